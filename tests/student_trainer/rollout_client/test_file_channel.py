"""Snapshots of the student's weights for rollout engines: complete, verified, and merged."""

from __future__ import annotations

import fcntl
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import Tensor

from clients.config.tables.common import LoraConfig, StudentConfig
from clients.config.tables.rollouts import RolloutsConfig
from clients.runs import file_system
from protos.errors import Corrupt, Unavailable
from student_trainer.checkpoints.export import export_model
from student_trainer.data.prompts import Prompt
from student_trainer.model.loading import load_model
from student_trainer.model.lora import load_adapters, scale_adapters
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.rollout_client import weight_channel as module
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import SingleTurnRollouts
from student_trainer.rollout_client.order import SamplingSettings
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.rollout_client.snapshot import open_snapshot, verify
from student_trainer.rollout_client.weight_channel import FileChannel, choose_snapshot_root
from student_trainer.rollout_service.service import RolloutServicer
from student_trainer.teachers.source import NoTeacher
from tests.forks import Forks
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.scripted_service import ScriptedEngine, serve_on_thread
from tests.student_trainer.saving import LIMIT
from tests.student_trainer.teachers.anchors import spread_student

PROBE = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    return tiny.save(tiny.model(seed=2, layers=2), tiny.tokenizer(), path)


def student_of(base: Path, sharding: str = "none", *, adapted: bool = False) -> Any:
    torch.manual_seed(7)
    lora = LoraConfig(rank=3) if adapted else None
    student = spread_student(load_model(StudentConfig(model=str(base), lora=lora)), sharding)
    with torch.no_grad():
        for name, parameter in student.trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return student


def make_channel(
    student: Any, root: Path, dtype: torch.dtype = torch.float32, *, adapters: bool = False
) -> FileChannel:
    return FileChannel(
        make_accelerator(LIMIT),
        student,
        root,
        job="run",
        attempt=1,
        dtype=dtype,
        adapters=adapters,
        in_flight="drain",
        probe_ids=PROBE,
        tokens_per_micro_batch=64,
    )


def logprobs(model: Any, ids: Tensor) -> Tensor:
    """Return log-probs of the tokens from full logits."""
    with torch.no_grad():
        full_logprobs = model(ids).logits.double().log_softmax(2)
    return full_logprobs[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_snapshot_is_the_exported_model(base: Path, tmp_path: Path, adapted: bool) -> None:
    student = student_of(base, adapted=adapted)
    version = make_channel(student, tmp_path / "weights").publish(3)
    assert (version.lineage, version.number, version.in_flight) == ("run-1", 3, "drain")
    snapshot = open_snapshot(version.directory)
    export_model(tmp_path / "export", model=student.trained.model, tokenizer=tiny.tokenizer())
    exported = load_file(tmp_path / "export" / "model.safetensors")
    snapshot_tensors = dict(snapshot.tensors())
    assert snapshot_tensors.keys() == exported.keys()
    assert all(torch.equal(snapshot_tensors[name], exported[name]) for name in snapshot_tensors)
    exported_model = load_model(StudentConfig(model=str(tmp_path / "export")))
    assert verify(snapshot.probe(), lambda ids: logprobs(exported_model, ids), "float32") < 1e-5
    other_model = load_model(StudentConfig(model=str(base)))
    other_model.get_input_embeddings().weight.data[3] += 0.01
    with pytest.raises(Corrupt, match="does not have the weights of this version"):
        verify(snapshot.probe(), lambda ids: logprobs(other_model, ids), "float32")


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_snapshot_of_adapters_has_nothing_else(base: Path, tmp_path: Path, sharding: str) -> None:
    """A few KiB; the base model with these adapters gives the trainer's log-probs."""
    student = student_of(base, sharding, adapted=True)
    snapshot = open_snapshot(make_channel(student, tmp_path, adapters=True).publish(3).directory)
    assert all(".lora_" in name for name, _ in snapshot.tensors())
    fresh = load_model(StudentConfig(model=str(base), lora=LoraConfig(rank=3, alpha=1.0)))
    load_adapters(snapshot.directory, fresh)
    scale_adapters(snapshot.directory, fresh)  # the student's alpha is 6
    assert verify(snapshot.probe(), lambda ids: logprobs(fresh, ids), "float32") < 1e-5
    plain = load_model(StudentConfig(model=str(base)))
    with pytest.raises(Corrupt, match="does not have the weights of this version"):
        verify(snapshot.probe(), lambda ids: logprobs(plain, ids), "float32")


def test_bfloat16_halves_it(base: Path, tmp_path: Path) -> None:
    student = student_of(base)
    float32_version = make_channel(student, tmp_path / "whole").publish(0)
    bfloat16_version = make_channel(student, tmp_path / "half", torch.bfloat16).publish(0)
    expected = dict(open_snapshot(float32_version.directory).tensors())
    for name, tensor in open_snapshot(bfloat16_version.directory).tensors():
        assert torch.equal(tensor, expected[name].bfloat16())


@pytest.mark.parametrize("harm", ["cut", "changed", "missing", "unsealed"])
def test_a_damaged_snapshot_is_refused(base: Path, tmp_path: Path, harm: str) -> None:
    directory = make_channel(student_of(base), tmp_path / "weights").publish(1).directory
    weights = directory / "model.safetensors"
    if harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif harm == "changed":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif harm == "missing":
        weights.unlink()
    else:
        (directory / "snapshot.json").unlink()
    with pytest.raises(Corrupt, match=r"snapshot|checksum"):
        open_snapshot(directory)


def test_old_versions_are_deleted(base: Path, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    channel = make_channel(student_of(base), root)
    for number in range(4):
        channel.publish(number)
        channel.delete_before(number - 1)
    assert sorted(path.name for path in root.iterdir()) == ["version-000002", "version-000003"]
    assert channel.publish(3).directory == root / "version-000003", "not written twice"
    channel.close()
    assert not root.exists()


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_as_many_versions_as_there_is_room_for(base: Path, tmp_path: Path, lag: int) -> None:
    """The number that the disk check assumes, with evaluations of student and anchor per step."""
    channel, max_versions = make_channel(student_of(base), tmp_path / "weights"), 0
    settings = SamplingSettings(1, 1.0, 0, 0, 2, 100)

    def prompts_of_step(step: int) -> tuple[list[Prompt], list[int]]:
        return [tiny.prompt(1, 2, 3)] * 2, [2 * step, 2 * step + 1]

    with (
        serve_on_thread(RolloutServicer(ScriptedEngine())) as address,
        EngineClient([address]) as client,
    ):
        ahead = RolloutsAhead(
            make_accelerator(LIMIT),
            client,
            channel,
            NoTeacher(),
            SingleTurnRollouts(client, settings, lambda: channel.newest),
            lag=lag,
            last_step=12,
        )
        for step in range(1, 9):
            assert len(ahead.of_step(step, prompts_of_step)) == 2
            for anchor in (False, True):
                ahead.publish(step, anchor=anchor)
                max_versions = max(max_versions, len(list((tmp_path / "weights").iterdir())))
    assert max_versions == RolloutsConfig(lag=lag).versions + 1, "and one of the anchor"


def test_a_full_disk_is_told_before_anything_is_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "snapshot_bytes", lambda *_, **__: 1 << 60)
    with pytest.raises(Unavailable, match="MiB"):
        make_channel(student_of(base), tmp_path / "weights").publish(0)


def test_what_killed_trainers_left_in_memory_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "MEMORY_DISK", tmp_path)
    (tmp_path / "distill-weights-killed").mkdir()
    alive = tmp_path / "distill-weights-alive"
    alive.mkdir()
    run = tmp_path / "run"
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    chosen = choose_snapshot_root(run, 2, 1000, local=True)
    assert chosen.parent == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, chosen.name}
    os.close(lock)
    assert choose_snapshot_root(run, 2, 1 << 60, local=True) == run / "weights" / "attempt-2"
    (run / "weights" / "attempt-1").mkdir(parents=True)
    assert choose_snapshot_root(run, 2, 1000, local=False) == run / "weights" / "attempt-2"
    assert not (run / "weights").exists(), "the first attempt was killed"


def test_another_trainer_deletes_a_directory_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainers start at the same time: one finds the unlocked directory of the other."""
    monkeypatch.setattr(file_system, "MEMORY_DISK", tmp_path)
    directories: list[Path] = []
    make_directory = tempfile.mkdtemp

    def interfere(**options: Any) -> str:
        directories.append(Path(make_directory(**options)))
        if len(directories) == 1:
            locks.append(os.open(directories[0], os.O_RDONLY))
            fcntl.flock(locks[0], fcntl.LOCK_EX)  # it is about to delete it
        elif len(directories) == 2:
            directories[1].rmdir()
        return str(directories[-1])

    locks: list[int] = []
    monkeypatch.setattr(tempfile, "mkdtemp", interfere)
    chosen = choose_snapshot_root(tmp_path / "run", 1, 1000, local=True)
    os.close(locks[0])
    assert chosen == directories[2]
    with pytest.raises(BlockingIOError):
        file_system._lock_directory(chosen)


def _write_too_much(base: Path, out: Path, sharding: str, adapted: bool) -> None:
    """Limit files of the main process to 4 KiB, so that a write fails as on a full disk."""
    rank = torch.distributed.get_rank()
    channel = make_channel(
        student_of(base, sharding, adapted=adapted), out / "weights", adapters=adapted
    )
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits_before[1]))
    try:
        channel.publish(0)
    except Unavailable as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)
        (out / f"{rank}.txt").write_text(str(error))
    channel.publish(0)  # all ranks reach the same collective


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_disk_that_fails_is_told_on_every_rank(
    base: Path, tmp_path: Path, sharding: str, adapted: bool
) -> None:
    """Gathering the weights is collective: no rank hangs, and all raise the same error."""
    group = tmp_path / "group"
    forks = Forks(2, group, _write_too_much, base, tmp_path, sharding, adapted)
    assert forks.wait() == [0, 0]
    messages = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(messages) == 1
    assert "cannot write the weights for the rollout engine" in messages.pop()
    assert open_snapshot(tmp_path / "weights" / "version-000000").number == 0


def _write_in_group(base: Path, root: Path, sharding: str) -> None:
    make_channel(student_of(base, sharding), root).publish(5)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_several_processes_write_the_same_bytes(base: Path, tmp_path: Path, sharding: str) -> None:
    expected_version = make_channel(student_of(base), tmp_path / "one").publish(5)
    forks = Forks(2, tmp_path / "group", _write_in_group, base, tmp_path / "two", sharding)
    assert forks.wait() == [0, 0]
    group_snapshot = open_snapshot(tmp_path / "two" / "version-000005")
    own_snapshot = open_snapshot(expected_version.directory)
    name = "model.safetensors"
    assert (group_snapshot.directory / name).read_bytes() == (
        own_snapshot.directory / name
    ).read_bytes()
    difference = (group_snapshot.probe().logprobs - own_snapshot.probe().logprobs).abs().max()
    assert difference < 1e-5
