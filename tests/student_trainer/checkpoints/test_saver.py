"""Checkpoints that are written while training continues."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clients.runs.fence import VARIABLE, raise_fence
from protos.errors import WrongState
from protos.rpc import failpoints
from student_trainer.checkpoints.atomic_directory import is_intact
from student_trainer.checkpoints.checkpoint import (
    checkpoint_path,
    collect_contents,
    newest_checkpoint,
)
from student_trainer.checkpoints.saver import Saver, announce_part
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.saving import saver_of


@pytest.fixture
def state() -> tuple[Any, torch.optim.Optimizer]:
    model = tiny.model(seed=6)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture(autouse=True)
def _disarm_failpoints() -> Any:
    yield
    failpoints.arm("")


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def test_a_checkpoint_is_the_state_when_it_was_asked_for(
    tmp_path: Path, state: tuple[Any, torch.optim.Optimizer]
) -> None:
    """At each of two saves, the weights change before the thread writes its first byte."""
    failpoints.arm("checkpoint-writing:sleep:0.2")
    model, _ = state
    saver = saver_of(tmp_path, model, tiny.tokenizer())
    expected = []
    for step in (1, 2):
        expected.append({name: weight.clone() for name, weight in model.state_dict().items()})
        saver.save(step, collect_contents(*state))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    saver.finish()
    for step in (1, 2):
        stored_weights = weights_of(checkpoint_path(tmp_path, step))
        assert stored_weights
        for name, weight in stored_weights.items():
            assert torch.equal(weight, expected[step - 1][name])


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, state: tuple[Any, torch.optim.Optimizer]
) -> None:
    """One checkpoint at a time: the second save waits until the first one is published."""
    may_publish = threading.Event()
    published: list[int] = []

    def record_newest() -> None:
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        published.append(newest[0])

    saver = saver_of(
        tmp_path,
        state[0],
        tiny.tokenizer(),
        before_publication=may_publish.wait,
        after_publication=record_newest,
    )
    assert saver.poll()
    saver.save(1, collect_contents(*state))
    assert not saver.poll()
    assert saver.is_writing
    assert newest_checkpoint(tmp_path) is None
    threading.Timer(0.1, may_publish.set).start()
    saver.save(2, collect_contents(*state))
    assert published[:1] == [1]
    saver.finish()
    assert (published, saver.is_writing) == ([1, 2], False)


def test_a_failed_write_is_raised_and_leaves_nothing(
    tmp_path: Path, state: tuple[Any, torch.optim.Optimizer]
) -> None:
    saver = saver_of(tmp_path, state[0], tiny.tokenizer())
    failpoints.arm("checkpoint-part-written:raise")
    saver.save(3, collect_contents(*state))
    with pytest.raises(OSError, match="Input/output error") as caught:
        saver.finish()
    path = checkpoint_path(tmp_path, 3)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert list(tmp_path.iterdir()) == []
    failpoints.arm("")
    saver.save(3, collect_contents(*state))  # the fault is gone
    saver.finish()
    assert is_intact(path)


def test_an_attempt_that_was_replaced_publishes_nothing(
    tmp_path: Path, state: tuple[Any, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if it is replaced while writing, nor before. The files of the new attempt stay."""
    monkeypatch.setenv(VARIABLE, raise_fence(tmp_path, 1))
    root = tmp_path / "checkpoints"
    successor_model = root / ".step-000004.2.tmp" / "model"

    def replace_attempt() -> None:
        raise_fence(tmp_path, 2)
        successor_model.mkdir(parents=True)

    saver = saver_of(root, state[0], tiny.tokenizer(), before_publication=replace_attempt)
    saver.save(4, collect_contents(*state))
    with pytest.raises(WrongState, match="attempt 1 was replaced"):
        saver.finish()
    with pytest.raises(WrongState, match="attempt 1 was replaced"):
        saver.save(5, collect_contents(*state))
    assert list(root.rglob("*")) == [successor_model.parent, successor_model]


def fail_one_rank(root: Path, failing_rank: int) -> None:
    """One process cannot write: every process raises, and records the error."""
    rank = int(os.environ["RANK"])
    model = tiny.model(seed=6)
    saver: Saver = saver_of(root / "checkpoints", model, tiny.tokenizer())
    if rank == failing_rank:
        failpoints.arm("checkpoint-part-written:raise")
    saver.save(1, collect_contents(model, torch.optim.AdamW(model.parameters())))
    try:
        saver.finish()
    except Exception as error:
        number = getattr(error, "errno", None)
        (root / f"rank-{rank}.json").write_text(json.dumps([type(error).__name__, number]))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_is_raised_in_all(tmp_path: Path, rank: int) -> None:
    assert Forks(2, tmp_path / "group", fail_one_rank, tmp_path, rank).wait() == [0, 0]
    errors = [json.loads((tmp_path / f"rank-{process}.json").read_text()) for process in (0, 1)]
    assert errors == [["OSError", errno.EIO]] * 2
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_main_process_may_delete_the_announcements_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes them as soon as it sees the last one, before the rename of that one returns."""
    rename = Path.replace

    def rename_and_delete(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        assert json.loads(target.read_text()) == {"a.safetensors": "digest"}
        shutil.rmtree(target.parent)
        return renamed

    monkeypatch.setattr(Path, "replace", rename_and_delete)
    (tmp_path / "parts").mkdir()
    announce_part(tmp_path / "parts" / "1.json", {"a.safetensors": "digest"})
    assert not (tmp_path / "parts").exists()
