"""A job with `rollouts.address`: the server checks its services before it queues the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.jobs.job import JobState
from clients.preflight import rollouts
from clients.preflight.rollouts import check_gpus
from clients.runs import started_services
from distill_server.jobs.preflight import JobPreflight
from protos.auth.access import MIN_TOKEN_CHARS
from protos.errors import DistillError, InvalidInput, Unavailable, WrongState
from tests.distill_server.jobs.preflight_site import Teacher, checking_site, job, serve_teacher
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.material import student
from tests.student_trainer.rollout_service.processes import ServiceProcess
from tests.student_trainer.rollout_service.scripted_service import ScriptedEngine, serve_on_thread

ADMIN, READ = "a" * MIN_TOKEN_CHARS, "r" * MIN_TOKEN_CHARS
NOBODY = "127.0.0.1:1"


@pytest.fixture
def teacher() -> Iterator[str]:
    with serve_teacher(Teacher()) as address:
        yield address


@pytest.fixture
def service() -> Iterator[str]:
    from student_trainer.rollout_service.service import RolloutServicer

    with serve_on_thread(RolloutServicer(ScriptedEngine())) as address:
        yield address


def test_services_that_fit(service: str, teacher: str, tmp_path: Path) -> None:
    with checking_site(tmp_path) as server:
        for address in (service, [service, service]):
            config = job(tmp_path, teacher, rollouts__address=address)
            assert server.submit(config) is JobState.QUEUED


def test_limits_that_nobody_set_fit_the_service(teacher: str, tmp_path: Path) -> None:
    """Student and service read 64 tokens; the defaults of the job have 768."""
    from student_trainer.rollout_service.service import RolloutServicer

    config = job(tmp_path, teacher)
    model = tmp_path / "student" / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "n_positions": 64}))
    engine = ScriptedEngine()
    engine.info = replace(engine.info, max_length=64)
    with serve_on_thread(RolloutServicer(engine)) as service:
        config["rollouts"] = {"address": service}
        with checking_site(tmp_path) as server:
            assert server.submit({**config, "method": {}}) is JobState.QUEUED
            with pytest.raises(InvalidInput, match=r"the rollout service at .* reads at most 64"):
                server.submit({**config, "method": {"max_new_tokens": 65}})


def test_one_of_two_services_is_away(
    service: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "_SECONDS", 3.0)
    with checking_site(tmp_path) as server:
        config = job(tmp_path, teacher, rollouts__address=[NOBODY, service])
        assert server.submit(config) is JobState.QUEUED


def test_services_that_do_not_fit(
    service: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "_SECONDS", 3.0)
    cases: list[tuple[dict[str, object], type[DistillError], str]] = [
        ({"rollouts__address": NOBODY}, Unavailable, f"no rollout service answers at {NOBODY}"),
        ({"rollouts__address": teacher}, InvalidInput, f"{teacher} is not a rollout service"),
        (
            {"rollouts__address": service, "rollouts__engine": "vllm"},
            WrongState,
            "has the engine hf, the job requests vllm",
        ),
    ]
    with checking_site(tmp_path) as server:
        for changes, category, message in cases:
            with pytest.raises(category, match=message) as exc_info:
                server.submit(job(tmp_path, teacher, **changes))
            assert exc_info.value.field.startswith("rollouts.")
            assert exc_info.value.hint


def test_a_service_of_other_code(
    service: str, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service without a protocol version is older than the field."""
    monkeypatch.setattr("student_trainer.rollout_service.service.ROLLOUTS_PROTOCOL", 0)
    with checking_site(tmp_path) as server, pytest.raises(WrongState) as exc_info:
        server.submit(job(tmp_path, teacher, rollouts__address=service))
    assert exc_info.value.field == "rollouts.address"
    assert f"{service} has another version of distill-service" in exc_info.value.message
    assert "start the service with the version of distill-service" in exc_info.value.hint


def test_gpus_that_the_machine_does_not_have(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs for the engine and one for the trainer. On a cluster, this machine needs none."""
    config = job(tmp_path, teacher, rollouts__lag=1, rollouts__gpus=2)
    with checking_site(tmp_path) as server:
        for visible_devices, gpu_count in (("", 0), ("4,7", 2)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
            with pytest.raises(
                InvalidInput, match=f"the machine has {gpu_count} GPUs, .* 2 more"
            ) as exc_info:
                server.submit(config)
            assert exc_info.value.field == "rollouts.gpus"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,5")
        assert server.submit(config) is JobState.QUEUED
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv(started_services.PLACED_VARIABLE, "services.json")
        check_gpus(OnPolicyJob.model_validate(config))  # as the trainer on the cluster checks
        check = JobPreflight(trainers_are_local=False)
        server.run(check(OnPolicyJob.model_validate(config), tmp_path / "runs"))


def test_the_token_of_the_server(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server needs an admin token; it sends a token derived from it, which cannot sample."""
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"admin {ADMIN}\nread {READ}\n")
    model = tiny.save(student(0), tiny.tokenizer(), tmp_path / "model")
    log = tmp_path / "service.log"
    process = ServiceProcess("--model", str(model), "--token-file", str(file), log=log)
    with closing(process), checking_site(tmp_path) as server:
        config = job(tmp_path, teacher, rollouts__address=process.address)
        for token in ("", READ, "x" * MIN_TOKEN_CHARS):
            monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", token)
            with pytest.raises(WrongState, match="does not accept the token of the distill server"):
                server.submit(config)
        monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", ADMIN)
        assert server.submit(config) is JobState.QUEUED
        assert "called by a job method=GetRolloutInfo job=preflight attempt=0" in log.read_text()
        unencrypted = job(tmp_path, teacher, rollouts__address="gpu-node:50053")
        with pytest.raises(InvalidInput, match="would be sent unencrypted") as exc_info:
            server.submit(unencrypted)
        assert exc_info.value.field == "rollouts.address"
