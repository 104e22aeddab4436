"""Copies of a run in an object storage: complete or ignored, the newest and the best one kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from clients.config.sft import SFTJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from protos.errors import Forbidden, InvalidInput, NotFound, WrongState
from student_trainer.checkpoints.atomic_directory import write_atomically
from student_trainer.checkpoints.copies import RunCopies

pytest.importorskip("moto")
from tests.object_storage import BUCKET, S3Server

pytestmark = pytest.mark.filterwarnings("default")  # moto's own


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in request.node.name)


def job(prefix: str, **change: Any) -> SFTJob:
    values: dict[str, Any] = {
        "name": "the run",
        "student": {"model": "/here/tiny"},
        "data": {"path": "/here/x.jsonl"},
        "method": {"type": "sft"},
        "checkpoint": {"copy_to": f"s3://{BUCKET}/{prefix}/"},
    }
    return SFTJob.model_validate(values | change)


class Machine:
    """A run directory of its own, and the copies of its newest attempt."""

    def __init__(self, path: Path, config: SFTJob) -> None:
        self.run = RunDirectory.create(path, config)
        self.config = config
        self.copies = self.attempt()

    def attempt(self, number: int = 1) -> RunCopies:
        progress = Progress(
            self.run, attempt=number, max_steps=9, main=True, terminated=lambda: False
        )
        return RunCopies(self.config, self.run, number, Accelerator(cpu=True), progress)

    def make(self, step: int, kl: float | None = None) -> None:
        """Write a checkpoint and a line of metrics, and wait until the copy is there."""
        with self.run.metrics.open("a") as file:
            metrics = {} if kl is None else {"eval/kl": kl}
            file.write(json.dumps({"attempt": 1, "step": step, **metrics}) + "\n")
        write_atomically(self.run.checkpoint(step), lambda path: self._fill(path, step))
        self.copies.begin()
        self.copies.finish(step)

    def _fill(self, path: Path, step: int) -> None:
        (path / "model").mkdir()
        (path / "model" / "weights.bin").write_bytes(bytes([step]) * 100_000)
        (path / "state.json").write_text(json.dumps({"step": step}))

    def files(self, step: int) -> dict[str, bytes]:
        root = self.run.checkpoint(step)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def steps_in(server: S3Server, prefix: str) -> list[int]:
    names = server.names(f"{prefix}/the run/checkpoints")
    return [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]


def test_the_newest_and_the_best_are_there(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    for step, kl in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3), (5, 0.2)):
        first.make(step, kl)
    assert steps_in(server, prefix) == [2, 4, 5], "the newest two and the best"
    write_atomically(first.run.export, lambda path: first._fill(path, 9))
    first.copies.finish(5)
    assert server.read(f"{prefix}/the run/export/model/weights.bin") == b"\x09" * 100_000
    assert server.read(f"{prefix}/the run/metrics.jsonl") == first.run.metrics.read_bytes()

    second = Machine(tmp_path / "second", job(prefix))
    second.copies = second.attempt(3)
    second.copies.fetch(None)
    assert second.run.checkpoint_steps() == (5,)
    assert second.files(5) == first.files(5)
    lines = [json.loads(line) for line in second.run.metrics.read_text().splitlines()]
    assert [(one["attempt"], one["step"]) for one in lines] == [(3, n) for n in range(1, 6)]
    second.make(6, 0.6)
    assert steps_in(server, prefix) == [2, 5, 6], "the best one of the first machine is kept"
    with pytest.raises(WrongState, match="another process is writing to"):
        first.make(7)
    with pytest.raises(WrongState):
        first.copies.begin()
    assert steps_in(server, prefix) == [2, 5, 6]
    for machine in (first, second):
        machine.copies.close()


@pytest.mark.parametrize("damage", ["no manifest", "other bytes", "a file is missing"])
def test_what_is_not_whole_is_not_used(
    server: S3Server, prefix: str, damage: str, tmp_path: Path
) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    first.make(1)
    first.make(2)
    first.copies.close()
    newest = f"{prefix}/the run/checkpoints/step-000002"
    match damage:
        case "no manifest":
            server.delete(f"{newest}/manifest.json")
        case "other bytes":
            server.write(f"{newest}/model/weights.bin", b"\x03" * 100_000)
        case _:
            server.delete(f"{newest}/model/weights.bin")
    second = Machine(tmp_path / "second", job(prefix))
    second.copies.fetch(None)
    assert second.run.checkpoint_steps() == (1,)
    assert second.files(1) == first.files(1)
    assert not [*second.run.checkpoints.glob(".*")]
    steps = [json.loads(line)["step"] for line in second.run.metrics.read_text().splitlines()]
    assert steps == [1]
    second.make(2)
    assert server.read(f"{newest}/model/weights.bin") == b"\x02" * 100_000
    second.copies.close()


def test_from_an_earlier_step(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    for step in (1, 2):
        first.make(step)
    first.copies.close()
    second = Machine(tmp_path / "second", job(prefix))
    second.copies.fetch(1)
    assert second.run.checkpoint_steps() == (1,)
    assert steps_in(server, prefix) == [1]
    second.copies.close()


def test_what_a_machine_lacks_and_what_the_storage_lacks(
    server: S3Server, prefix: str, tmp_path: Path
) -> None:
    """A run directory that was newer than its copies is copied; an older one is brought forward."""
    late = Machine(tmp_path / "late", job(prefix, checkpoint={}))
    late.make(1)
    late.config = job(prefix)
    late.copies = late.attempt(2)
    late.copies.fetch(None)
    assert steps_in(server, prefix) == [1]
    other = Machine(tmp_path / "other", job(prefix))
    other.copies.fetch(None)
    other.make(2)
    other.copies.close()
    late.copies.close()
    late.copies = late.attempt(3)
    late.copies.fetch(None)
    assert late.run.checkpoint_steps() == (1, 2)
    late.copies.close()


def test_another_job_is_refused(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    first.make(1)
    elsewhere = job(
        prefix,
        student={"model": "/there/tiny"},
        data={"path": "/there/x.jsonl"},
        max_steps=900,
        labels={"a": "b"},
        train={"processes": 2},
    )
    same = Machine(tmp_path / "same", elsewhere)
    same.copies.fetch(None)
    assert same.run.checkpoint_steps() == (1,)
    same.copies.close()
    for change, text in (
        ({"train": {"learning_rate": 0.5}}, "another train.learning_rate: 1e-05, not 0.5"),
        ({"student": {"model": "/here/large"}}, "another student.model: 'tiny', not 'large'"),
        ({"seed": 3}, "another seed: 0, not 3"),
    ):
        other = Machine(tmp_path / text[:12], job(prefix, **change))
        with pytest.raises(InvalidInput, match=text) as caught:
            other.copies.fetch(None)
        assert caught.value.field == "checkpoint.copy_to"
        other.copies.close()
        assert not other.run.checkpoint_steps()
    first.copies.close()


def test_refused_with_the_key(server: S3Server, prefix: str, tmp_path: Path) -> None:
    nowhere = {"copy_to": "s3://nowhere/x"}
    machine = Machine(tmp_path / "none", job(prefix, checkpoint=nowhere))
    with pytest.raises(NotFound, match=r"checkpoint\.copy_to: .*there is no such bucket"):
        machine.copies.fetch(None)
    server.refuse_everybody()
    try:
        machine = Machine(tmp_path / "refused", job(prefix))
        with pytest.raises(Forbidden, match=r"checkpoint\.copy_to: .*refuses the credentials"):
            machine.copies.fetch(None)
    finally:
        server.refuse_nobody()
    for place in ("/disk", "s3://bucket", "http://x/y", "s3:/b/p"):
        with pytest.raises(ValueError, match=r"checkpoint\.copy_to"):
            job(prefix, checkpoint={"copy_to": place})


def test_a_storage_that_is_away(
    server: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is waited for; a run that is asked to stop does not wait."""
    machine = Machine(tmp_path / "run", job(prefix))
    machine.copies.fetch(None)
    machine.make(1)
    server.stop()
    try:
        write_atomically(machine.run.checkpoint(2), lambda path: machine._fill(path, 2))
        machine.copies.begin()
        machine.copies.finish(2, hurry=True)
        assert "does not answer" in caplog.text
    finally:
        server.start()
    machine.copies = machine.attempt(2)
    machine.copies.fetch(None)
    assert steps_in(server, prefix) == [1, 2]
    machine.copies.close()
