"""Rollout engines on a Ray cluster of two nodes, one of them in a network namespace."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from clients.runs.started_services import read_placed
from tests.distill_server.conftest import eventually
from tests.end_to_end.conftest import material, once
from tests.end_to_end.processes import metrics_of, weights
from tests.namespaces import Namespace, namespace
from tests.ray_cluster import Cluster

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

pytest.importorskip("ray", reason="needs the extra [ray]")
pytest.importorskip("aiohttp", reason="needs the extra [ray]")

pytestmark = [pytest.mark.timeout(1800)]
__all__ = ["material", "once"]
PATIENCE = 400.0
STEPS, LAG = 60, 2
# Claimed GPUs: a process takes two, an engine one, so that only an engine fits the second node.
GPUS = {"processes": 2 * 2, "engines": 2}


@pytest.fixture
def other_machine() -> Iterator[Namespace]:
    with namespace() as new_namespace:
        yield new_namespace


@contextmanager
def second_node(cluster: Cluster, machine: Namespace, log: Path) -> Iterator[Callable[[], None]]:
    """Run a node with room for one engine; yield a function that kills the node."""
    ray = str(Path(sys.executable).with_name("ray"))
    options = [f"--address={cluster.address}", f"--node-ip-address={machine.there}"]
    command = [ray, "start", "--block", *options, "--num-cpus=1", "--num-gpus=1"]
    with log.open("ab") as output:
        node = subprocess.Popen(machine.command(*command), stdout=output, stderr=output)

    def lose() -> None:
        if node.poll() is None:
            for process in [*psutil.Process(node.pid).children(recursive=True), node]:
                process.kill()
        node.wait(20)

    try:
        yield lose
    finally:
        lose()


def placed_addresses(run: RunDirectory) -> list[str]:
    """Return the addresses of the engines; "" for a lost one."""
    return [service.address for service in read_placed(run.logs(1) / "rollout-services.json")[0]]


def step(run: RunDirectory) -> int:
    return max((line["step"] for line in metrics_of(run)), default=0)


def engines_at(address: str) -> list[psutil.Process]:
    """Return the processes of engines that listen at an address."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "student_trainer.rollout_service" in (words := process.info["cmdline"] or [])
        and address in words
        and "distill_server.runners.local.shim" not in words  # the engine's parent process
    ]


def curve_of(run: RunDirectory) -> list[dict[str, Any]]:
    from tests.student_trainer.tiny import curve

    return curve(metrics_of(run))


def test_a_node_of_an_engine_is_lost_and_comes_back(
    material: Material, other_machine: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes and an engine on the head, an engine on the node that is lost: same bits."""
    from tests.distill_server.runners.test_ray import RayServer
    from tests.student_trainer.tiny import rl_job

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    config = rl_job(
        material,
        max_steps=STEPS,
        rollouts__gpus=GPUS["engines"],
        rollouts__lag=LAG,
        train__processes=2,
        resources__gpus=sum(GPUS.values()),
        resources__cpus=2,
    )
    gpus = GPUS["processes"] + 1
    cluster = Cluster(tmp_path / "ray", 3, dashboard=True, host=other_machine.here, gpus=gpus)
    server = RayServer(tmp_path / "runs", cluster.jobs, "--gpus", str(sum(GPUS.values())))
    try:
        server.start()
        with DistillClient(server.address) as client:

            def submit() -> tuple[Job, RunDirectory]:
                job = client.submit(config)
                run = RunDirectory(server.runs / job.id)
                eventually((run.logs(1) / "rollout-services.json").exists, PATIENCE)
                return job, run

            def wait_until_succeeded(job: Job) -> None:
                final_job = client.wait(job.id, timeout=PATIENCE)
                assert (final_job.state, final_job.attempt) == (JobState.SUCCEEDED, 1), (
                    final_job.reason
                )

            with second_node(cluster, other_machine, tmp_path / "node") as lose:
                job, run = submit()
                eventually(lambda: step(run) >= 2 and all(placed_addresses(run)), PATIENCE)
                assert {address.partition(":")[0] for address in placed_addresses(run)} == {
                    *(other_machine.here, other_machine.there)
                }
                other_machine.set_link("down")
                lose()
                step_before = step(run)
                # The other engine samples.
                eventually(lambda: step(run) > step_before + LAG, PATIENCE)
                # The job waits for the one that comes back. Ray takes half a minute to notice the
                # loss, in which the job would end.
                [engine] = engines_at(other_machine.here)
                engine.suspend()
                eventually(lambda: placed_addresses(run).count("") == 1, PATIENCE)
            other_machine.set_link("up")
            with second_node(cluster, other_machine, tmp_path / "node"):
                eventually(lambda: all(placed_addresses(run)), PATIENCE)
                step_before = step(run)
                eventually(lambda: step(run) > step_before, PATIENCE)
                engine.resume()
                wait_until_succeeded(job)
                time.sleep(1)  # Ray frees the job's resources
                undisturbed_job, expected = submit()
                wait_until_succeeded(undisturbed_job)
    finally:
        if server.process is not None:
            server.kill()
        cluster.kill()
    assert curve_of(run) == curve_of(expected)
    assert weights(run) == weights(expected)
