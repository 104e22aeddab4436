"""Copies of a run in object storage: complete or ignored; the newest and the best are kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from clients.config.kinds import AnyTraining
from clients.config.on_policy import OnPolicyJob
from clients.config.sft import SFTJob
from clients.preflight.limits import NO_LIMITS, Limits, write_limits
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import Progress, run_to_verdict
from clients.runs.started_services import connected, write_address
from clients.store.objects import ObjectFolder
from protos.errors import DistillError, Forbidden, InvalidInput, NotFound, WrongState
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.atomic_directory import (
    is_intact,
    read_manifest,
    write_atomically,
)
from student_trainer.checkpoints.copies import RunCopies, copied_limits

pytest.importorskip("moto")
from tests.object_storage import BUCKET, S3Server, prefix, server

__all__ = ["prefix", "server"]

pytestmark = pytest.mark.filterwarnings("default")  # warnings of moto


@pytest.fixture(autouse=True)
def _set_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


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
    """A run directory on one machine, with the copies of its newest attempt."""

    def __init__(self, path: Path, config: AnyTraining) -> None:
        self.run = RunDirectory.create(path, config)
        self.config: AnyTraining = config
        self.copies = self.attempt()

    def attempt(self, number: int = 1) -> RunCopies:
        progress = Progress(
            self.run, attempt=number, max_steps=9, main=True, terminated=lambda: False
        )
        return RunCopies(self.config, self.run, number, Accelerator(cpu=True), progress)

    def resume(self, number: int = 1, from_step: int | None = None) -> int:
        """Start an attempt as `assemble` does, and return the step from which it continues."""
        self.copies.close()
        self.copies = self.attempt(number)
        self.copies.fetch(from_step)
        newest = checkpoint.newest_checkpoint(
            self.run.checkpoints, from_step, intact=self.copies.is_intact
        )
        step = newest[0] if newest else 0
        checkpoint.delete_after(self.run.checkpoints, step)
        lines = self.run.metrics.read_text().splitlines() if self.run.metrics.exists() else []
        kept_lines = [line for line in lines if json.loads(line)["step"] <= step]
        self.run.metrics.write_text("".join(f"{line}\n" for line in kept_lines))
        self.copies.resume_from(step)
        return step

    def make(self, step: int, kl: float | None = None, mark: bytes = b"") -> None:
        """Write a checkpoint and a line of metrics, and wait until the copy is complete."""
        with self.run.metrics.open("a") as file:
            metrics = {} if kl is None else {"eval/kl": kl}
            file.write(json.dumps({"attempt": 1, "step": step, **metrics}) + "\n")
        write_atomically(self.run.checkpoint(step), lambda path: self._fill(path, step, mark))
        self.copies.begin()
        self.copies.finish(step)

    def _fill(self, path: Path, step: int, mark: bytes = b"") -> None:
        (path / "model").mkdir()
        (path / "model" / "weights.bin").write_bytes((mark or bytes([step])) * 100_000)
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
    assert second.resume(3) == 5
    assert second.run.checkpoint_steps() == (5,)
    assert second.files(5) == first.files(5)
    lines = [json.loads(line) for line in second.run.metrics.read_text().splitlines()]
    assert [(line["attempt"], line["step"]) for line in lines] == [(3, n) for n in range(1, 6)]
    second.make(6, 0.6)
    assert steps_in(server, prefix) == [2, 5, 6], "the best one of the first machine is kept"
    with pytest.raises(WrongState, match="another process is writing to"):
        first.make(7)
    with pytest.raises(WrongState):
        first.copies.begin()
    assert steps_in(server, prefix) == [2, 5, 6]
    for machine in (first, second):
        machine.copies.close()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("no manifest", marks=pytest.mark.slow),
        "other bytes",
        pytest.param("a file is missing", marks=pytest.mark.slow),
    ],
)
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
    assert second.resume() == 1
    assert second.run.checkpoint_steps() == (1,)
    assert second.files(1) == first.files(1)
    assert not [*second.run.checkpoints.glob(".*")]
    steps = [json.loads(line)["step"] for line in second.run.metrics.read_text().splitlines()]
    assert steps == [1]
    second.make(2)
    assert server.read(f"{newest}/model/weights.bin") == b"\x02" * 100_000
    second.copies.close()


def test_nothing_is_written_outside_the_run(server: S3Server, prefix: str, tmp_path: Path) -> None:
    """Whoever may write to the storage may not write to the machine that resumes."""
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    first.make(1)
    first.make(2)
    first.make(3)
    first.copies.close()
    newest = f"{prefix}/the run/checkpoints/step-000003"
    manifest = json.loads(server.read(f"{newest}/manifest.json"))
    manifest["files"]["../../../escaped"] = hashlib.sha256(b"x").hexdigest()
    server.write(f"{newest}/manifest.json", json.dumps(manifest).encode())
    server.write(f"{prefix}/the run/checkpoints/step-000002/stray", b"x")
    for key in ("../../../escaped", "../escaped"):
        server.write(f"{newest}/{key}", b"x")
        server.write(f"{prefix}/the run/checkpoints/step-000002/{key}", b"x")
    second = Machine(tmp_path / "second", job(prefix))
    assert second.resume() == 2
    assert second.files(2) == first.files(2)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("escaped", "stray")]
    second.copies.close()


@pytest.mark.parametrize(
    "files",
    [
        *({name: "0"} for name in ("../x", "/x", "a/../../x", "a//x", "", ".", "./x", "x\0")),
        *({"manifest.json": "0"}, {"x": []}, {"x": 1}, [], None),
    ],
    ids=repr,
)
def test_a_manifest_with_wrong_names_is_not_read(tmp_path: Path, files: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    with pytest.raises(ValueError, match=r"names a file|no files|no digest"):
        read_manifest(tmp_path)
    assert not is_intact(tmp_path)


@pytest.mark.slow
def test_from_an_earlier_step(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    for step in (1, 2):
        first.make(step)
    first.copies.close()
    second = Machine(tmp_path / "second", job(prefix))
    assert second.resume(from_step=1) == 1
    assert second.run.checkpoint_steps() == (1,)
    assert steps_in(server, prefix) == [1]
    second.copies.close()


@pytest.mark.slow
def test_a_rewound_run_replaces_its_copies(server: S3Server, prefix: str, tmp_path: Path) -> None:
    """The run directory still has the later checkpoints when the storage is read."""
    machine = Machine(tmp_path / "run", job(prefix))
    assert machine.resume() == 0
    for step in (1, 2, 3):
        machine.make(step, 1 / step, b"O")
    assert machine.resume(2, from_step=1) == 1
    machine.copies.finish(1)
    assert steps_in(server, prefix) == [1], "also while nothing new is there"
    for step in (2, 3):
        machine.make(step, 1 / step, b"N")
    assert steps_in(server, prefix) == [2, 3]
    for step in (2, 3):
        place = f"{prefix}/the run/checkpoints/step-{step:06d}/model/weights.bin"
        assert server.read(place) == b"N" * 100_000
    machine.copies.close()


def damage(path: Path, kind: str) -> None:
    match kind:
        case "a file is missing":
            (path / "model" / "weights.bin").unlink()
        case "the manifest is cut":
            (path / "manifest.json").write_text('{"files": {')
        case _:
            (path / "model" / "weights.bin").write_bytes(b"x" * 100_000)


@pytest.mark.parametrize(
    "kind",
    [
        "the manifest is cut",
        pytest.param("other bytes", marks=pytest.mark.slow),
        pytest.param("a file is missing", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_not_copied(
    server: S3Server, prefix: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path / "run", job(prefix))
    machine.resume()
    for step, kl in ((1, 0.1), (2, 0.5), (3, 0.4)):
        machine.make(step, kl)
    # All checkpoints of the run directory are damaged: the newest one comes from the storage.
    folder = f"{prefix}/the run/checkpoints"
    files_of_step_3 = machine.files(3)
    for step in (1, 2, 3):
        damage(machine.run.checkpoint(step), kind)
    assert machine.resume(2) == 3
    assert machine.files(3) == files_of_step_3
    for name in server.names(folder):
        assert server.read(f"{folder}/{name}/model/weights.bin") == bytes([int(name[5:])]) * 100_000
    # The storage has lost all copies: the best one is damaged, and stays in the run directory.
    for name in server.names(folder):
        machine.copies._folder.delete_folder(f"checkpoints/{name}")
    assert machine.resume(3) == 3
    machine.copies.finish(3)
    assert steps_in(server, prefix) == [3]
    assert "step-000001 is damaged, and is not copied" in caplog.text
    # The newest one is damaged too: the run continues from the one before, and copies it again.
    machine.make(4, 0.3)
    for name in server.names(folder):
        machine.copies._folder.delete_folder(f"checkpoints/{name}")
    damage(machine.run.checkpoint(4), kind)
    assert machine.resume(4) == 3
    machine.make(4, 0.3, b"N")
    assert server.read(f"{folder}/step-000004/model/weights.bin") == b"N" * 100_000
    machine.copies.close()


def test_asked_to_stop_while_the_storage_is_silent(prefix: str, tmp_path: Path) -> None:
    """With an unreachable storage, the status says so and the run ends as cancelled."""
    machine = Machine(tmp_path / "run", job(prefix))
    stop_requested = threading.Event()
    progress = Progress(
        machine.run, attempt=1, max_steps=9, main=True, terminated=stop_requested.is_set
    )
    copies = RunCopies(machine.config, machine.run, 1, Accelerator(cpu=True), progress)
    phases = []

    def stop() -> None:
        status = machine.run.read_status()
        phases.append(status and status.phase)
        stop_requested.set()

    def attempt() -> Verdict:
        stopping = threading.Timer(1, stop)
        stopping.start()
        copies.fetch(None)
        return "succeeded"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert run_to_verdict(progress, attempt) == 0
    copies.close()
    assert phases == [f"asking the storage s3://{BUCKET}/{prefix}/the run"]
    status = machine.run.read_status()
    assert status is not None
    assert status.verdict == "cancelled"


def test_a_file_that_is_away_is_told(prefix: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "run", job(prefix))
    (machine.run.path / "job.json").unlink()
    with pytest.raises(NotFound, match=r"job\.json: No such file"):
        machine.copies.fetch(None)
    machine.copies.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_fault_of_this_machine_does_not_end_the_training(
    server: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The error is logged, and the next checkpoint is copied."""
    machine = Machine(tmp_path / "run", job(prefix))
    machine.copies.fetch(None)
    with monkeypatch.context() as broken:

        def fails(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        broken.setattr(ObjectFolder, "send", fails)
        with pytest.raises(DistillError, match=os.strerror(code)):
            machine.make(1)
    machine.copies.begin()
    machine.copies.finish(1)
    machine.copies.close()
    assert steps_in(server, prefix) == [1]


def test_what_a_machine_lacks_and_what_the_storage_lacks(
    server: S3Server, prefix: str, tmp_path: Path
) -> None:
    """A run directory newer than its copies is copied; an older one gets the newer checkpoints."""
    late = Machine(tmp_path / "late", job(prefix, checkpoint={}))
    late.make(1)
    late.config = job(prefix)
    late.copies = late.attempt(2)
    late.copies.fetch(None)
    late.copies.resume_from(1)
    late.copies.finish(1)
    assert steps_in(server, prefix) == [1]
    other_machine = Machine(tmp_path / "other", job(prefix))
    other_machine.copies.fetch(None)
    other_machine.make(2)
    other_machine.copies.close()
    late.copies.close()
    late.copies = late.attempt(3)
    late.copies.fetch(None)
    assert late.run.checkpoint_steps() == (1, 2)
    late.copies.close()


def test_another_job_is_refused(server: S3Server, prefix: str, tmp_path: Path) -> None:
    first = Machine(tmp_path / "first", job(prefix))
    first.copies.fetch(None)
    first.make(1)
    moved_job = job(
        prefix,
        student={"model": "/there/tiny"},
        data={"path": "/there/x.jsonl"},
        max_steps=900,
        labels={"a": "b"},
        train={"processes": 2},
    )
    moved_machine = Machine(tmp_path / "same", moved_job)
    moved_machine.copies.fetch(None)
    assert moved_machine.run.checkpoint_steps() == (1,)
    moved_machine.copies.close()
    for change, text in (
        ({"train": {"learning_rate": 0.5}}, "another train.learning_rate: 1e-05, not 0.5"),
        ({"student": {"model": "/here/large"}}, "another student.model: 'tiny', not 'large'"),
        ({"seed": 3}, "another seed: 0, not 3"),
    ):
        changed_machine = Machine(tmp_path / text[:12], job(prefix, **change))
        with pytest.raises(InvalidInput, match=text) as caught:
            changed_machine.copies.fetch(None)
        assert caught.value.field == "checkpoint.copy_to"
        changed_machine.copies.close()
        assert not changed_machine.run.checkpoint_steps()
    first.copies.close()


def test_the_limits_of_the_first_machine_are_those_of_the_next(
    server: S3Server, prefix: str, tmp_path: Path
) -> None:
    """Its data may have grown, or its teacher may read more."""
    config, reasons = job(prefix), {"train.prompts_per_step": "the data has 64 records"}
    progress = Progress(
        RunDirectory.create(tmp_path / "next", config),
        attempt=1,
        max_steps=9,
        main=True,
        terminated=lambda: False,
    )
    assert copied_limits(config, progress) is None
    first = Machine(tmp_path / "first", config)
    first.copies.fetch(None)
    assert copied_limits(config, progress) == NO_LIMITS, "an earlier version made the copies"
    write_limits(first.run.path, Limits({"train.prompts_per_step": 6}, reasons))
    first.copies.fetch(None)
    first.copies.close()
    limits = copied_limits(config, progress)
    assert limits == Limits({"train.prompts_per_step": 6}, reasons)
    same_job = job(prefix, train={"prompts_per_step": 6})
    assert copied_limits(same_job, progress) == limits
    with pytest.raises(InvalidInput, match=r"another train\.prompts_per_step: 6, not 7"):
        copied_limits(job(prefix, train={"prompts_per_step": 7}), progress)


def test_a_started_teacher_has_another_address_in_each_attempt(
    server: S3Server, prefix: str, tmp_path: Path
) -> None:
    """The copies have the job with `teacher.model`, and the attempts have addresses instead."""
    teacher = {"model": "/here/teacher", "dtype": "float32", "batch_invariant": True, "top_k": 8}
    values = job(prefix).model_dump(include={"name", "student", "data", "checkpoint"})
    config = OnPolicyJob.model_validate(values | {"teacher": teacher})
    machine = Machine(tmp_path / "run", config)
    for number, address in enumerate(("localhost:1", "localhost:2"), 1):
        write_address(machine.run.path, address)
        machine.config = connected(config, machine.run.path)
        assert machine.resume(number) == 0
    machine.config = connected(
        config.model_copy(update={"teacher": config.teacher.model_copy(update={"top_k": 9})}),
        machine.run.path,
    )
    with pytest.raises(InvalidInput, match=r"another teacher\.top_k: 8, not 9"):
        machine.resume(3)
    machine.copies.close()


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
    for place in ("/disk", "s3://bucket", "http://x/y", "s3:/b/p", "s3://b/../p", "s3://b/./p"):
        with pytest.raises(ValueError, match=r"checkpoint\.copy_to"):
            job(prefix, checkpoint={"copy_to": place})


@pytest.mark.slow
def test_a_storage_that_is_away(
    server: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run waits for the storage, unless it is asked to stop."""
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
    assert machine.resume(2) == 2
    machine.copies.finish(2)
    assert steps_in(server, prefix) == [1, 2]
    machine.copies.close()
