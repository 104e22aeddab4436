"""A store made of what a real vLLM server answered, and a student that learns from it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from clients.store.dataset import LogitDataset
from clients.store.import_dump import Dump, import_dump
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from tests.vllm.test_training import finished
from tests.vllm.vllm_server import KEY, NAME, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

K, COUNT = 6, 24


def test_rows_of_the_model_and_a_job(tmp_path: Path) -> None:
    from clients.config.offline import OfflineJob
    from student_trainer.tools.pretrain import make_model
    from teacher_service.engines.hf import HfEngine
    from tests.student_trainer import tiny

    material = tiny.save_material(tmp_path / "material")
    words = tiny.tokenizer()
    torch.manual_seed(5)
    tiny.save(make_model(len(words), words, 2, 64), words, material.teacher)  # heads of 32
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, len(words), 4 + n).astype(np.int32) for n in range(COUNT)]
    dump = tmp_path / "dump.jsonl"
    with vllm_server(material.teacher, tmp_path / "log") as address, dump.open("w") as lines:
        for text in texts:
            request_fields = {
                "model": NAME,
                "prompt": text.tolist(),
                "max_tokens": 1,
                "temperature": 0,
            }
            answer = httpx.post(
                f"{address}/v1/completions",
                json={**request_fields, "prompt_logprobs": K, "return_token_ids": True},
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=60,
            )
            lines.write(json.dumps(answer.json()) + "\n")
    store = tmp_path / "store"
    assert import_dump(store, Dump(dump, material.teacher)) == COUNT
    stored = LogitDataset(store)
    engine = HfEngine(str(material.teacher), dtype="float32")
    for number, text in enumerate(texts):
        item = stored[number]
        [rows] = engine.score([ScoreQuery(text, 1, top_k=K)])
        assert isinstance(rows, RowBlock)
        assert np.array_equal(item["input_ids"], text)
        assert np.abs(item["head_logprobs"] - rows.head_logprobs).max() < 5e-3  # float16
        assert np.abs(item["tail_logmass"] - rows.tail_logmass).max() < 1e-3
        assert np.abs(item["token_logprobs"] - rows.token_logprobs).max() < 1e-3
    job = OfflineJob.model_validate(
        {
            "student": {"model": str(material.student)},
            "data": {"path": str(store)},
            "method": {"type": "offline"},
            "max_steps": 20,
            "train": {"learning_rate": 3e-3, "prompts_per_step": 8},
            "eval": {"every": 20, "prompts": 8},
            "checkpoint": {"every": 20},
            "track": {"tensorboard": False},
        }
    )
    losses = finished(tmp_path / "run", job)
    before, after = (line["eval/kl_bound"] for line in losses if "eval/kl_bound" in line)
    assert after < before
