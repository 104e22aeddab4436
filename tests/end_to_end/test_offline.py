"""Capture once, train without a teacher: killed, with swapped or damaged stores, refused, mixed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from protos.errors import ExitCode
from tests.end_to_end.conftest import Once
from tests.end_to_end.forked_trainer import finish, kill_after_checkpoint, trainer
from tests.end_to_end.processes import MakeServer, metrics_of, new_run, weights
from tests.end_to_end.test_two_processes import assert_close
from tests.teacher_service.capture.material import capture_here

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SEQUENCES = 200


@pytest.fixture(scope="session")
def store(material: Material, once: Once) -> Path:
    """A store with the teacher's rows; no teacher runs afterwards."""

    def capture_answers(path: Path) -> None:
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

    return once("captured", capture_answers) / "store"


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


def assert_refused(run: RunDirectory, code: ExitCode, *messages: str, attempt: int = 1) -> None:
    lines_before = metrics_of(run)
    with trainer(run, attempt) as process:
        assert process.wait() == code, process.log
    assert metrics_of(run) == lines_before, "refused before the first step"
    for message in messages:
        assert message in reason_of(run), reason_of(run)


def test_the_held_out_kl_falls(undisturbed: RunDirectory) -> None:
    lines = metrics_of(undisturbed)
    first_line, last_line = lines[0], lines[-1]
    assert (first_line["step"], last_line["step"]) == (0, 40)
    assert last_line["eval/kl"] < 0.5 * first_line["eval/kl"]
    assert last_line["eval/perplexity"] > 1
    assert all(math.isfinite(line.get("loss", 0.0)) for line in lines)
    assert lines[1]["kl/teacher"] == lines[1]["loss"], "no other tail, no cross-entropy"


def test_killed_swapped_and_resumed(
    material: Material, store: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """Killed in the second epoch of 24 steps; the run resumes only with its original store."""
    from tests.student_trainer.small_store import sums, write_store
    from tests.student_trainer.tiny import curve, model

    store_copy, moved_store = tmp_path / "store", tmp_path / "aside"
    shutil.copytree(store, store_copy)
    run = new_run(tmp_path / "run", job_of(material, store_copy))
    with trainer(run, 1) as process:
        process.wait_for_step(30)
        process.kill()
    store_copy.rename(moved_store)
    write_store(store_copy, model(seed=8), sums(SEQUENCES), samples=4)
    message = "is not the store that this run started with; restore the original store"
    assert_refused(run, ExitCode.WRONG_STATE, "data.path: ", message, attempt=2)
    shutil.rmtree(store_copy)
    moved_store.rename(store_copy)
    finish(run, 3)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


@pytest.mark.slow
def test_adapters_in_shares(material: Material, store: Path, tmp_path: Path) -> None:
    """Two processes (FSDP2, LoRA) equal one; 7 sequences, so that their shares differ."""
    changes = {
        "max_steps": 4,
        "eval__every": 2,
        "eval__prompts": 5,
        "train__prompts_per_step": 7,
        "train__tokens_per_micro_batch": 12,
        "student__lora": {"rank": 4},
    }
    process_options = {"train__processes": 2, "train__sharding": "fsdp2"}
    single_run = finish(new_run(tmp_path / "one", job_of(material, store, **changes)))
    sharded_run = finish(
        new_run(tmp_path / "two", job_of(material, store, **changes, **process_options))
    )
    assert_close(metrics_of(sharded_run), metrics_of(single_run))


def test_a_damaged_sequence_ends_the_job(
    material: Material, store: Path, undisturbed: RunDirectory, tmp_path: Path
) -> None:
    """Its step is not trained, earlier steps are kept; the run resumes after the repair."""
    from tests.student_trainer.tiny import curve

    store_copy = tmp_path / "store"
    shutil.copytree(store, store_copy)
    run = new_run(tmp_path / "run", job_of(material, store_copy))
    shard = sorted(store_copy.glob("*.arrow"))[1]
    sound_bytes = shard.read_bytes()
    middle = len(sound_bytes) // 2
    shard.write_bytes(
        sound_bytes[:middle] + bytes([sound_bytes[middle] ^ 1]) + sound_bytes[middle + 1 :]
    )
    with trainer(run) as process:
        assert process.wait() == ExitCode.JOB_FAILED, process.log
    for text in (
        f" of {store_copy}: ",
        f"(shard {shard.name})",
        f"distill store verify {store_copy}",
    ):
        assert text in reason_of(run)
    status = run.read_status()
    assert status is not None
    kept_steps = [int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")]
    assert max(kept_steps, default=0) == status.step
    shard.write_bytes(sound_bytes)
    finish(run, 2)
    assert curve(metrics_of(run)) == curve(metrics_of(undisturbed))
    assert weights(run) == weights(undisturbed)


def test_mixed(material: Material, store: Path, teacher: str, tmp_path: Path) -> None:
    """A quarter of each step are the student's own answers, scored by a live teacher."""
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


@pytest.mark.slow
def test_mixed_with_answers_of_an_engine(
    material: Material, store: Path, teacher: str, tmp_path: Path
) -> None:
    """Without lag, an engine changes no bit; with lag, a killed trainer resumes to the same bits.

    The lag is longer than the read-ahead.
    """
    from tests.student_trainer.rollout_service.processes import ServiceProcess
    from tests.student_trainer.tiny import curve

    log = tmp_path / "service.log"
    service = ServiceProcess("--model", str(material.student), log=log)
    mixed_options: dict[str, Any] = {
        "max_steps": 8,
        "method__on_policy_fraction": 0.25,
        "teacher__address": teacher,
    }
    engine_options = {**mixed_options, "rollouts__address": service.address}
    lagging_config = job_of(material, store, **engine_options, rollouts__lag=3)
    try:
        local_run = finish(new_run(tmp_path / "here", job_of(material, store, **mixed_options)))
        engine_run = finish(new_run(tmp_path / "there", job_of(material, store, **engine_options)))
        expected_run = finish(new_run(tmp_path / "expected", lagging_config))
        run = new_run(tmp_path / "run", lagging_config)
        kill_after_checkpoint(run)
        finish(run, 2)
    finally:
        service.close()
    assert weights(engine_run) == weights(local_run)
    lines = metrics_of(expected_run)
    assert [line["rollout/lag"] for line in lines[1:]] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert curve(metrics_of(run)) == curve(lines)
    assert weights(run) == weights(expected_run) != weights(local_run)


@pytest.mark.slow
def test_submitted(
    material: Material, store: Path, undisturbed: RunDirectory, make_server: MakeServer,
    tmp_path: Path,
) -> None:  # fmt: skip
    server = make_server()
    with DistillClient(server.address) as client:
        job = client.submit(job_of(material, store))
        for event in client.watch(job.id):
            last_event = event
        assert last_event.state is JobState.SUCCEEDED, last_event.reason
        path = client.pull(job.id, str(tmp_path / "pulled"))
    server_run = RunDirectory(server.runs / job.id)
    assert weights(server_run) == weights(undisturbed)
    assert (Path(path) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "has_other_tokenizer", [True, False], ids=["another tokenizer", "another k"]
)
def test_refused_before_the_first_step(
    has_other_tokenizer: bool, material: Material, store: Path, tmp_path: Path
) -> None:
    """Other refusals are tested in tests/student_trainer/data/test_captured_stores.py."""
    from tests.student_trainer import tiny

    if not has_other_tokenizer:
        run = new_run(tmp_path / "run", job_of(material, store, method__top_k=8))
        assert_refused(run, ExitCode.WRONG_STATE, "method.top_k: ", "captured with 4")
        return
    characters = "*" + tiny.ALPHABET
    student = tiny.model(characters=characters)
    path = tiny.save(student, tiny.tokenizer(characters), tmp_path / "student")
    run = new_run(tmp_path / "run", job_of(material, store, student__model=str(path)))
    messages = ("student.model: ", "the tokenizers differ: id 1 is '*'", "the store's tokenizer")
    assert_refused(run, ExitCode.WRONG_STATE, *messages)
    assert not run.metrics.exists()
