"""What a process has loaded from which trainers and teachers are forked: see tests/forks.py."""

from __future__ import annotations

import importlib
import os

# As in a process that starts by itself; libraries read it when they are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
for _name in (
    "student_trainer.__main__",
    "student_trainer.assembly",
    "student_trainer.model.lora",
    "teacher_service.engines.hf",
    "teacher_service.program",
    "transformers.models.qwen3.modeling_qwen3",
):
    importlib.import_module(_name)
