"""Modules preloaded in the process from which tests fork others: see tests/forks.py."""

from __future__ import annotations

import importlib
import os

# As in a separately started process; libraries read these variables at their import.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
for _name in (
    "clients.cli.app",
    "clients.cli.commands.run",
    "distill_server.__main__",
    "distill_server.server",
    "pyarrow.compute",
    "pyarrow.ipc",
    "student_trainer.__main__",
    "student_trainer.assembly",
    "student_trainer.exam.__main__",
    "student_trainer.exam.job",
    "student_trainer.model.lora",
    "student_trainer.rollout_service.__main__",
    "student_trainer.rollout_service.engines.hf",
    "student_trainer.rollout_service.program",
    "teacher_service.__main__",
    "teacher_service.capture.__main__",
    "teacher_service.capture.program",
    "teacher_service.engines.fake",
    "teacher_service.engines.hf",
    "teacher_service.program",
    "transformers.models.qwen3.modeling_qwen3",
    # Modules of tests that run in the forked processes.
    "tests.distill_server.dashboard.scripted_site",
    "tests.distill_server.scripted_server",
    "tests.end_to_end.forked_teacher",
    "tests.end_to_end.forked_trainer",
    "tests.forked_python",
    "tests.student_trainer.teachers.anchors",
    "tests.teacher_service.capture.forking",
):
    importlib.import_module(_name)
