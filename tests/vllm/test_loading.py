"""How far vLLM is with the weights, as told by the worker process that reads them."""

from __future__ import annotations

import importlib.util
import re
import threading
from pathlib import Path

import pytest

from teacher_service.engines.vllm import VllmEngine
from teacher_service.models.load_progress import LoadProgress
from tests.vllm.model import save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


def test_the_worker_tells_its_share(tmp_path: Path) -> None:
    progress, ended, stages = LoadProgress(), threading.Event(), []

    def look() -> None:
        while not ended.wait(0.02):
            stages.append(str(progress))

    thread = threading.Thread(target=look)
    thread.start()
    engine = VllmEngine(str(save_model(tmp_path)), progress=progress)
    ended.set()
    thread.join()
    engine.close()
    stage = "starting vLLM and reading its weights"
    assert stage in stages  # before its worker runs
    shares = [
        int(match[1])
        for progress_text in stages
        if (match := re.fullmatch(rf"{stage}: (\d+)%", progress_text))
    ]
    assert shares == sorted(shares)
    # The file has names and shapes beside the values; vLLM starts for a while with all weights.
    assert 80 <= shares[-1] <= 100
