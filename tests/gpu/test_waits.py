"""The places where the host waits for the GPU in an update, as the CUDA runtime reports them.

`tests/student_trainer/loop/test_synchronizations.py` records them on a CPU. This test also sees
waits within operators.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.student_trainer import tiny
from tests.student_trainer.methods.test_rl import trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_update_waits_once(material: tiny.Material, tmp_path: Path) -> None:
    with trainer_of(tmp_path / "run", tiny.rl_job(material)) as trainer:
        updates = trainer.method.steps(1).updates
        trainer.learner.learn(1, updates[0], 1e-3)  # the optimizer allocates its state
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.learner.learn(1, updates[-1], 1e-3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [
        f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    ]
    assert len(waits) == 1, waits
