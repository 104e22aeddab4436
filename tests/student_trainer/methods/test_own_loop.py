"""The training loops of docs/python.md have the loss of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from clients.runs.directory import RunDirectory
from student_trainer.model.loading import load_model
from student_trainer.model.student import Student
from tests.documents import blocks
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.offline_trainer import trainer_of
from tests.student_trainer.small_store import sums, write_store
from tests.teacher_service.conftest import StartTeacher, start_teacher  # noqa: F401

CHANGES = {"method__tail": "bucket", "train__tokens_per_micro_batch": 10_000}


def test_the_loss_and_the_gradient_are_those_of_a_job(
    material: tiny.Material, tmp_path: Path
) -> None:
    teacher = load_model(tiny.job(material, student__model=str(material.teacher)).student)
    store = write_store(tmp_path / "store", teacher, sums(40), samples=0, temperature=1.0)
    run = RunDirectory.create(tmp_path / "run", tiny.offline_job(material, store, **CHANGES))
    with trainer_of(run) as trainer:
        pending = trainer.method.steps(1).updates[0]
        expected = add_gradients(trainer, pending)["loss"]
        items = [item.wait() for item in pending]
    gradients = dict(trainer.student.trained.model.named_parameters())
    (block,) = blocks("docs/python.md", "own-trainer")
    names: dict[str, Any] = {}
    exec(block.body.partition("model = ")[0], names)
    records = [
        {
            "input_ids": item.sequence.token_ids.numpy(),
            "start": item.sequence.start,
            **vars(item.rows),
        }
        for item in items
    ]
    model = AutoModelForCausalLM.from_pretrained(material.student, dtype=torch.float32)
    inputs = names["collate"](records)
    loss = names["Distiller"].compute_loss(None, Student(model), inputs)
    loss.backward()
    assert abs(loss.item() - expected) < 1e-6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert gradients[name].grad is not None
        assert (parameter.grad - gradients[name].grad).abs().max() < 1e-6, name


def test_the_loop_learns(
    start_teacher: StartTeacher,  # noqa: F811
    material: tiny.Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    teacher = start_teacher("--engine", "fake", "--model", "vocab=13")
    records = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 20)] * 24
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "student").symlink_to(material.student)
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("docs/python.md", "own-loop")
    assert block.body.count("localhost:50052") == block.body.count("lr=1e-5") == 1
    example = block.body.replace("localhost:50052", teacher.address)
    exec(example.replace("lr=1e-5", "lr=1e-2"), {})
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained("trained")
