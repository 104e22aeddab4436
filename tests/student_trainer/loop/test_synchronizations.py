"""An update of one process waits for the GPU once: to read its metrics and the gradient's norm.

Updates of several processes have collectives that wait, and are not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from clients.runs.directory import RunDirectory
from student_trainer.data.batch import copy_to_device
from student_trainer.data.packing import micro_batches
from student_trainer.loop.trainer import Trainer
from student_trainer.model.loading import load_model
from tests.student_trainer import tiny
from tests.student_trainer.loop.synchronizations import Synchronizations
from tests.student_trainer.methods import test_on_policy, test_rl, test_sft
from tests.student_trainer.methods.offline_trainer import trainer_of as offline_trainer
from tests.student_trainer.small_store import sums, write_store


@pytest.fixture(scope="module")
def store(material: tiny.Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    teacher = load_model(tiny.job(material, student__model=str(material.teacher)).student)
    return write_store(tmp_path_factory.mktemp("stored") / "store", teacher, sums(40), samples=2)


@contextmanager
def trainer_of(
    method: str, material: tiny.Material, store: Path, path: Path, changes: Any
) -> Iterator[Trainer]:
    match method:
        case "on_policy":
            run = RunDirectory.create(path, tiny.job(material, **changes))
            yield test_on_policy.make_trainer(material, run)[0]
        case "offline":
            job = tiny.offline_job(material, store, **changes)
            with offline_trainer(RunDirectory.create(path, job)) as trainer:
                yield trainer
        case "rl":
            with test_rl.trainer_of(path, tiny.rl_job(material, **changes)) as trainer:
                yield trainer
        case "sft":
            with test_sft.trainer_of(path, tiny.sft_job(material, **changes)) as trainer:
                yield trainer


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("on_policy", {}),
        ("offline", {"method__cross_entropy": 0.4}),
        ("sft", {}),
        ("rl", {}),
        pytest.param(
            "rl",
            {"method__ratio": "sequence", "method__importance_clip": [0.1, 3.0]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_update_waits_once(
    method: str, changes: Any, material: tiny.Material, store: Path, tmp_path: Path
) -> None:
    with trainer_of(method, material, store, tmp_path / "run", changes) as trainer:
        learner = trainer.learner
        if method == "on_policy":  # with the metrics of a job with several teachers
            objective = replace(cast(Any, learner.method.objective), teachers=("",))
            learner.method = replace(learner.method, objective=objective)
        updates = trainer.method.steps(1).updates
        learner.learn(1, updates[0], 1e-3)  # the optimizer allocates its state
        pending = updates[-1]
        layout = trainer.student.full.layout
        tokens = trainer.config.train.tokens_per_micro_batch
        assert len(micro_batches(pending, tokens, layout)) > 1
        with Synchronizations(trainer.student.trained) as record:
            learner.learn(1, pending, 1e-3)
    waits = [event.place for event in record.events]
    assert waits == [("student_trainer/loop/step.py", "sum_over_ranks")], record.events
    assert record.copies > 0


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("_local_scalar_dense", lambda weight: float(weight.detach().sum())),
        ("_local_scalar_dense", lambda weight: bool((weight > 0).all())),
        ("tolist", lambda weight: weight.detach().tolist()),
        ("numpy", lambda weight: weight.detach().numpy()),
        ("cpu", lambda weight: weight.detach().cpu()),
        ("nonzero", lambda weight: (weight > 0).nonzero()),
        ("index by a mask", lambda weight: weight[weight > 0]),
        ("index of host and device", lambda weight: weight[torch.tensor([0])]),
        ("_unique2", lambda weight: weight.detach().unique()),
        ("new_tensor", lambda weight: weight.new_tensor(1.0)),
        ("tensor", lambda weight: torch.tensor(1.0, device=weight.device)),
        ("copy to the device", lambda weight: torch.ones(3).to(weight.device) + weight[0, 0]),
        ("", lambda weight: torch.ones(3).to(weight.device, non_blocking=True) + weight[0, 0]),
        ("", lambda weight: torch.where(weight > 0, weight, 0).sum().backward()),
        ("", lambda weight: torch.tensor([1.0]).tolist()),
    ],
)
def test_each_kind_of_wait_is_recorded(kind: str, operation: Callable[[Any], object]) -> None:
    model = torch.nn.Linear(4, 4)
    with Synchronizations(model) as record:
        operation(model.weight)
    assert [event.kind for event in record.events] == ([kind] if kind else [])


def test_rows_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, copies = torch.ones(2), []

    def copy(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> None:
        copies.append((tensor is pinned, device.type, non_blocking))

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    copy_to_device(torch.zeros(2), torch.device("cuda"))
    assert copies == [(True, "cuda", True)]
