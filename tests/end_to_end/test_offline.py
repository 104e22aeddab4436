"""Capture once, train with no teacher: the whole way, killed, swapped, damaged, refused, mixed."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from protos.errors import ExitCode
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, killed_after_checkpoint, trainer
from tests.end_to_end.processes import MakeServer, metrics_of, new_run, weights
from tests.end_to_end.test_two_processes import assert_close
from tests.teacher_service.capture.material import capture_here

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SEQUENCES = 200
# Of the processor, so that it does not count what else the machine does. Most of it is torch.
SECONDS = 10.0


@pytest.fixture(scope="session")
def store(material: Material, once: Once) -> Path:
    """What the teacher thinks of its task's answers; it is gone when this is done."""

    def make(path: Path) -> None:
        from clients.config.capture import CaptureJob

        path.mkdir()
        lines = material.prompts.read_text().splitlines(keepends=True)
        (path / "data.jsonl").write_text("".join(lines[:SEQUENCES]))
        config = CaptureJob.model_validate(
            {
                "data": {"path": str(path / "data.jsonl")},
                "teacher": {"model": str(material.teacher), "top_k": 4, "max_batch_tokens": 256},
                "method": {
                    "type": "capture",
                    "store": str(path / "store"),
                    "tail_samples": 4,
                    "shard_bytes": 8000,
                },
            }
        )
        verdict, _ = capture_here(path / "run", config)
        assert verdict == "succeeded"

    return once("captured", make) / "store"


def job_of(material: Material, store: Path, **changes: Any) -> Any:
    from tests.student_trainer.tiny import offline_job

    return offline_job(material, store, **{"max_steps": 40, **changes})


@pytest.fixture(scope="session")
def undisturbed(material: Material, store: Path, once: Once) -> RunDirectory:
    config = job_of(material, store)
    return RunDirectory(once("offline", lambda path: finish(new_run(path, config))))


def reason_of(run: RunDirectory) -> str:
    status = run.read_status()
    assert status is not None
    assert status.verdict == "failed"
    assert "\n" not in status.reason
    return status.reason


def assert_refused(run: RunDirectory, code: ExitCode, *says: str, attempt: int = 1) -> None:
    before = os.times()
    with trainer(run, attempt, launched=True) as process:
        assert process.wait() == code, process.log
    after = os.times()
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system < SECONDS
    for text in says:
        assert text in reason_of(run), reason_of(run)


def test_the_held_out_kl_falls(undisturbed: RunDirectory) -> None:
    lines = metrics_of(undisturbed)
    first, last = lines[0], lines[-1]
    assert (first["step"], last["step"]) == (0, 40)
    assert last["eval/kl"] < 0.5 * first["eval/kl"]
    assert last["eval/perplexity"] > 1
    assert all(math.isfinite(line.get("loss", 0.0)) for line in lines)
    assert lines[1]["kl/teacher"] == lines[1]["loss"], "no other tail, no cross-entropy"


def test_killed_swapped_and_resumed(
    material: Material, store: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """Killed in the second epoch of 24 steps; it goes on with the store that it began with."""
    from tests.student_trainer.small_store import sums, write_store
    from tests.student_trainer.tiny import curve, model

    place, aside = tmp_path / "store", tmp_path / "aside"
    shutil.copytree(store, place)
    run = new_run(tmp_path / "run", job_of(material, place))
    with trainer(run, 1) as process:
        process.wait_for_step(30)
        process.kill()
    place.rename(aside)
    write_store(place, model(seed=8), sums(SEQUENCES), samples=4)
    says = "is not the store that this run started with; restore the original store"
    assert_refused(run, ExitCode.WRONG_STATE, "data.path: ", says, attempt=2)
    shutil.rmtree(place)
    aside.rename(place)
    finish(run, 3)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


def test_adapters_in_shares(material: Material, store: Path, tmp_path: Path) -> None:
    """Two processes (FSDP2, LoRA) learn what one does; 7 sequences, so that their parts differ."""
    changes = {
        "max_steps": 4,
        "eval__every": 2,
        "eval__prompts": 5,
        "train__prompts_per_step": 7,
        "train__tokens_per_micro_batch": 12,
        "student__lora": {"rank": 4},
    }
    pair = {"train__processes": 2, "train__sharding": "fsdp2"}
    one = finish(new_run(tmp_path / "one", job_of(material, store, **changes)))
    two = finish(new_run(tmp_path / "two", job_of(material, store, **changes, **pair)))
    assert_close(metrics_of(two), metrics_of(one))


def test_a_damaged_sequence_ends_the_job(
    material: Material, store: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """Nothing of its step is learned, the steps before are kept; once mended, it goes on."""
    from tests.student_trainer.tiny import curve

    copied = tmp_path / "store"
    shutil.copytree(store, copied)
    run = new_run(tmp_path / "run", job_of(material, copied))
    shard = sorted(copied.glob("*.arrow"))[1]
    whole = shard.read_bytes()
    at = len(whole) // 2
    shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with trainer(run) as process:
        assert process.wait() == ExitCode.JOB_FAILED, process.log
    for text in (f" of {copied}: ", f"(shard {shard.name})", f"distill store verify {copied}"):
        assert text in reason_of(run)
    status = run.read_status()
    assert status is not None
    kept = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
    assert max(kept, default=0) == status.step
    shard.write_bytes(whole)
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


def test_mixed(material: Material, store: Path, teacher: str, tmp_path: Path) -> None:
    """A quarter of each step is the student's own, scored live."""
    changes = {
        "max_steps": 12,
        "method__on_policy_fraction": 0.25,
        "method__cross_entropy": 0.001,
        "teacher__address": teacher,
        "eval__metric": "exact_match",
        "data__eval_prompts": str(material.prompts),
    }
    lines = metrics_of(finish(new_run(tmp_path / "run", job_of(material, store, **changes))))
    assert lines[-1]["eval/kl"] < lines[0]["eval/kl"]
    assert "eval/accuracy" in lines[-1]
    for line in lines[1:]:
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-3), "over what was sampled"
        assert line["loss"] > line["kl/teacher"], "cross-entropy of what was stored"


def test_mixed_with_answers_of_an_engine(
    material: Material, store: Path, teacher: str, tmp_path: Path
) -> None:
    """Without lag to the bit as in the trainer; with lag, a killed trainer goes on to equal bits.

    The lag is further than what is read ahead.
    """
    from tests.student_trainer.rollout_service.processes import ServiceProcess
    from tests.student_trainer.tiny import curve

    log = tmp_path / "service.log"
    service = ServiceProcess("--model", str(material.student), log=log)
    mixed: dict[str, Any] = {
        "max_steps": 8,
        "method__on_policy_fraction": 0.25,
        "teacher__address": teacher,
    }
    engine = {**mixed, "rollouts__address": service.address}
    lagging = job_of(material, store, **engine, rollouts__lag=3)
    try:
        here = finish(new_run(tmp_path / "here", job_of(material, store, **mixed)))
        there = finish(new_run(tmp_path / "there", job_of(material, store, **engine)))
        expected = finish(new_run(tmp_path / "expected", lagging))
        run = new_run(tmp_path / "run", lagging)
        killed_after_checkpoint(run)
        finish(run, 2)
    finally:
        service.close()
    assert weights(there) == weights(here)
    lines = metrics_of(expected)
    assert [line["rollout/lag"] for line in lines[1:]] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert curve(metrics_of(run)) == curve(lines)
    assert weights(run) == weights(expected) != weights(here)


def test_submitted(
    material: Material, store: Path, undisturbed: RunDirectory, make_server: MakeServer,
    tmp_path: Path,
) -> None:  # fmt: skip
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(job_of(material, store))
        for event in client.watch(job.id):
            last = event
        assert last.state is JobState.SUCCEEDED, last.reason
        path = client.pull(job.id, str(tmp_path / "pulled"))
    found = RunDirectory(server.runs / job.id)
    assert weights(found) == weights(undisturbed)
    assert (Path(path) / "model.safetensors").is_file()


@pytest.mark.parametrize("other", [True, False], ids=["another tokenizer", "another k"])
def test_refused_in_seconds(other: bool, material: Material, store: Path, tmp_path: Path) -> None:
    """What else is refused is in tests/student_trainer/data/test_captured_stores.py."""
    from tests.student_trainer import tiny

    if not other:
        run = new_run(tmp_path / "run", job_of(material, store, method__top_k=8))
        assert_refused(run, ExitCode.WRONG_STATE, "method.top_k: ", "captured with 4")
        return
    characters = "*" + tiny.ALPHABET
    student = tiny.model(characters=characters)
    path = tiny.save(student, tiny.tokenizer(characters), tmp_path / "student")
    run = new_run(tmp_path / "run", job_of(material, store, student__model=str(path)))
    says = ("student.model: ", "the tokenizers differ: id 1 is '*'", "the store's tokenizer")
    assert_refused(run, ExitCode.WRONG_STATE, *says)
    assert not run.metrics.exists()
