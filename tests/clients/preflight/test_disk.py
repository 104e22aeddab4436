"""The estimate of a job's disk space includes the weights for rollout engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.preflight.disk import check_space, parameters_of
from clients.runs import file_system
from protos.errors import WrongState
from tests.distill_server.jobs.preflight_site import job, write_student

LAG = 8


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A student whose checkpoint and export take 0.72 of the free space: 16 bytes per weight."""
    free = shutil.disk_usage(tmp_path).free
    write_student(tmp_path / "student", rows=int(0.045 * free) // 1000)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def make_config(site: Path, **rollouts: Any) -> OnPolicyJob:
    student = {"student__model": str(site / "student"), "checkpoint__every": 1}
    values = job(site, "localhost:1", **student)
    return OnPolicyJob.model_validate({**values, "max_steps": 1, "rollouts": rollouts})


def test_versions_of_the_weights_need_room(site: Path) -> None:
    """`lag` older versions, the newest one and the one being written: each 4 bytes per weight."""
    check_space(make_config(site), site / "run")
    free = shutil.disk_usage(site).free
    version = 4 * parameters_of(site / "student")
    with pytest.raises(WrongState) as caught:
        check_space(make_config(site, lag=LAG), site / "run")
    assert caught.value.field == "rollouts.lag"
    assert f"and 10 versions of the weights of {version / 1e9:.3g} GB" in caught.value.message
    assert caught.value.hint.startswith("lower the value, free disk space, or enlarge /dev/shm")
    check_space(
        make_config(site, lag=LAG), site / "run", here=False
    )  # a cluster node has its own memory disk
    old_weights = site / "run" / "weights" / "attempt-1"
    old_weights.mkdir(parents=True)
    with (old_weights / "model.safetensors").open("wb") as file:
        file.truncate(3 * free)
    check_space(make_config(site, lag=LAG), site / "run")  # the next attempt deletes it


def test_bfloat16_takes_half(site: Path) -> None:
    """Two versions take 0.36 of the free space, or 0.18 in bfloat16."""
    job_config = make_config(site, engine="vllm", lag=0)
    check_space(job_config, site / "run")
    values = job_config.model_dump(mode="json")
    values["student"]["dtype"] = "float32"
    with pytest.raises(WrongState, match="and 2 versions of the weights"):
        check_space(OnPolicyJob.model_validate(values), site / "run")


def test_versions_in_memory_need_none(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_config = make_config(site, lag=LAG)
    needed_bytes = (job_config.rollouts.versions + 1) * 4 * parameters_of(site / "student")
    usage = shutil.disk_usage
    roomy_usage = usage(site)._replace(free=3 * needed_bytes)
    memory = site / "memory"
    memory.mkdir()
    monkeypatch.setattr(file_system, "MEMORY_DISK", memory)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: roomy_usage if path == memory else usage(path)
    )
    check_space(job_config, site / "run")
    # The services at an address may run on other machines: their weights are in the run directory.
    with pytest.raises(WrongState, match="and 10 versions of the weights"):
        check_space(make_config(site, lag=LAG, address="localhost:1"), site / "run")
