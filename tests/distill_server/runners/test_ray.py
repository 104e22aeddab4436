"""Jobs on a separate Ray cluster on this machine, whose head one of the tests kills."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from clients.config.on_policy import OnPolicyJob
from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import raise_fence
from distill_server.runners.local.process import Identity, family, identity_of, kill_family
from distill_server.runners.local.shim_files import card_of, exit_code_of
from distill_server.runners.order import TrainerOrder, write_order
from tests.distill_server import conftest
from tests.distill_server.conftest import Server, job_config
from tests.distill_server.jobs.history import History
from tests.end_to_end.conftest import material, once, teacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import ENVIRONMENT, RealServer, metrics_of, new_run, weights
from tests.ray_cluster import Cluster

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

pytest.importorskip("ray", reason="needs the extra [ray]")
pytest.importorskip("aiohttp", reason="needs the extra [ray]")

pytestmark = [pytest.mark.timeout(900)]
KILLS = int(os.environ.get("DISTILL_REPEATS", "2"))
# Ray's processes import for seconds: on a busy machine an attempt starts late.
PATIENCE = 200
__all__ = ["material", "once", "teacher"]


def eventually(condition: Callable[[], object]) -> None:
    conftest.eventually(condition, PATIENCE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes that require a token; they claim more CPUs than exist, since scripts use few."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        new_cluster = Cluster(tmp_path_factory.mktemp("ray") / "log", 4, 4, dashboard=True)
        yield new_cluster
        new_cluster.kill()


@pytest.fixture
def start_server(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(slots: int = 4, **options: object) -> Server:
        servers.append(Server(tmp_path / "runs", slots, ray=cluster.jobs, **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        if server.process is not None:
            server.kill()
        for path in server.runs.rglob("shim.json"):
            if shim_card := card_of(path.parent):
                kill_family(shim_card.mark)


def wait_for_shim(server: Server, job_id: str, attempt: int = 1, rank: int = 0) -> Path:
    """Wait until a process's shim has started; return its directory."""
    directory = server.runs / job_id / f"logs/attempt-{attempt}/rank-{rank}"
    eventually(lambda: card_of(directory))
    return directory


def mark_of(directory: Path) -> str:
    card = card_of(directory)
    assert card is not None
    return card.mark


def check(history: History, server: Server, client: DistillClient, jobs: Sequence[Job]) -> None:
    """Check the rules of the history, and that no order.json with secrets is left."""
    for job in jobs:
        history.watched(job.id, list(client.watch(job.id)))
    history.check(server.runs, server.slots)
    assert not list(server.runs.rglob("order.json"))


def test_jobs_end_are_tried_again_and_stopped(start_server: Callable[..., Server]) -> None:
    server, history = start_server(), History()
    scripts = [
        ("pause=0.01", 5),
        ("pause=0.01 crash_at=3 crashes=1 every=2", 5),
        ("pause=0.05", 1_000_000),
        ("hang_at=3 deaf=1 orphan=1", 1_000_000),
    ]
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(script, steps)) for script, steps in scripts]
        for job in jobs:
            history.submitted("", job.id)
        good_id, crashing_id, polite_id, deaf_id = (job.id for job in jobs)
        eventually(lambda: client.get(polite_id).step >= 3 and client.get(deaf_id).step >= 2)
        mark = mark_of(wait_for_shim(server, deaf_id))
        client.cancel(polite_id)
        client.cancel(deaf_id, now=True)
        final_jobs = [client.wait(job.id, timeout=PATIENCE) for job in jobs]
        assert [(job.state, job.attempt) for job in final_jobs] == [
            (JobState.SUCCEEDED, 1),
            (JobState.SUCCEEDED, 2),
            (JobState.CANCELLED, 1),
            (JobState.CANCELLED, 1),
        ]
        assert final_jobs[2].reason == "cancelled on request"
        assert (server.runs / polite_id / "checkpoints" / f"step-{final_jobs[2].step:06d}").is_dir()
        assert "killed by signal 9" in final_jobs[3].reason
        assert family(mark) == []  # the orphan, too
        lines = b"".join(client.logs(good_id)).decode().splitlines()
        assert lines == ["attempt 1 starts after step 0", *(f"step {n}" for n in range(1, 6))]
        assert (
            "starts after step 2"
            in (server.runs / crashing_id / "logs/attempt-2/rank-0.log").read_text()
        )
        check(history, server, client, jobs)


def test_waiting_for_more_than_there_is(start_server: Callable[..., Server]) -> None:
    """The cluster has no GPU; the job's phase says what it waits for, and it can be cancelled."""
    server, history = start_server(gpus=2), History()
    config = job_config("gpus", 5)
    config = OnPolicyJob.model_validate({**config.model_dump(), "resources": {"gpus": 1}})
    with DistillClient(server.address) as client:
        job = client.submit(config)
        history.submitted("", job.id)
        claim_path = server.runs / job.id / "logs/attempt-1/claim"
        eventually(claim_path.exists)
        phase = "waiting for the Ray cluster: no node has 1 CPU and 1 GPU"
        eventually(lambda: client.get(job.id).phase == phase)
        assert client.get(job.id).state == JobState.PREPARING
        client.cancel(job.id)
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert (final_job.state, final_job.reason) == (JobState.CANCELLED, "cancelled on request")
        check(history, server, client, [job])


def test_a_stranger_is_refused(cluster: Cluster) -> None:
    """A wrong token is refused. In a subprocess, since Ray reads its token once per process."""
    refusal = ask_cluster("jobs.get_state('job')", cluster, RAY_AUTH_TOKEN="0" * 64)
    assert refusal.startswith("WrongState the Ray cluster refused the call: Authentication failed")
    # From another host than this machine: the cluster requires a token, so it is not open.
    answer = ask_cluster(
        "jobs._host = 'elsewhere'; print(jobs.get_state('job'), jobs.is_open())", cluster
    )
    assert answer == "UnknownRayJob() False\n"


def test_a_node_that_cannot_begin_says_why(cluster: Cluster, tmp_path: Path) -> None:
    """As if the run directory is not shared: a file blocks the shim's directory."""
    run = RunDirectory(tmp_path / "run")
    directory = run.logs(1)
    directory.mkdir(parents=True)
    (directory / "rank-0").touch()
    order = TrainerOrder(
        str(run.path), 1, ["-c", "pass"], {FENCE: raise_fence(run.path, 1)}, "/", 1, 1, 0
    )
    write_order(directory / "order.json", order)
    subprocess.run(
        [sys.executable, "-m", "distill_server.runners.ray.driver", str(directory / "order.json")],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        check=False,
    )
    assert exit_code_of(directory) == -signal.SIGKILL
    log = run.log_file(1).read_text()
    assert re.fullmatch(r"process 0 ended first, with code -9: .*File exists: .*rank-0'\n", log)


def ask_cluster(question: str, cluster: Cluster, **variables: str) -> str:
    code = (
        "import sys\nfrom distill_server.runners.ray.jobs import RayJobs\n"
        f"try: jobs = RayJobs(sys.argv[1]); {question}\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, cluster.jobs],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=True,
    )
    return process.stdout


RANKS = """
import os, subprocess, time
print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)
subprocess.Popen(['sleep', '1000'], start_new_session=True)
time.sleep(1000)
"""


def test_a_rank_or_its_worker_is_killed(
    start_server: Callable[..., Server], cluster: Cluster
) -> None:
    """The attempt ends and no process is left, not even one in a session of its own."""
    server, history = start_server(slots=2, ranks=RANKS, retries=0), History()
    with DistillClient(server.address) as client:
        jobs = [client.submit(pair(job_config(name))) for name in ("rank", "worker")]
        for job in jobs:
            history.submitted("", job.id)
        shims = [[wait_for_shim(server, job.id, rank=rank) for rank in (0, 1)] for job in jobs]
        marks = [mark_of(shim) for job_shims in shims for shim in job_shims]
        for mark in marks:
            eventually(lambda mark=mark: len(family(mark)) == 2)
        os.kill(child_of(shims[0][1]).pid, signal.SIGKILL)
        rank_job = client.wait(jobs[0].id, timeout=PATIENCE)
        for worker in cluster.processes("ray::Rank"):
            worker.kill()
        for job in (rank_job, client.wait(jobs[1].id, timeout=PATIENCE)):
            assert job.state is JobState.FAILED
            assert job.reason.startswith("the trainer was killed by signal 9")
            text = (server.runs / job.id / "logs/attempt-1/rank-0.log").read_text()
            assert re.fullmatch(
                "rank 0 of 2\nprocess [01] ended first, with code -9(: .+)?\n", text
            )
            assert job.reason.endswith(text.strip())
        assert "process 1" in rank_job.reason
        for mark in marks:
            eventually(lambda mark=mark: not family(mark))
        check(history, server, client, jobs)


PLACES = """
import os
print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))
"""


def test_a_job_of_two_nodes(start_server: Callable[..., Server]) -> None:
    """The job needs both nodes: no node has eight CPUs."""
    server, history = start_server(slots=1, ranks=PLACES, retries=0, threads=8), History()
    with DistillClient(server.address) as client:
        job = client.submit(pair(job_config("two nodes")))
        history.submitted("", job.id)
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert final_job.reason.startswith("the trainer exited with code 0 without a final status")
        logs = [server.runs / job.id / f"logs/attempt-1/rank-{rank}.log" for rank in (0, 1)]
        assert [log.read_text() for log in logs] == ["0 2 0 1\n", "1 2 0 1\n"]
        check(history, server, client, [job])


def pair(config: OnPolicyJob) -> OnPolicyJob:
    values = config.model_dump()
    return OnPolicyJob.model_validate({**values, "train": {**values["train"], "processes": 2}})


def child_of(shim: Path) -> Identity:
    mark = mark_of(shim)
    (child,) = [identity for identity in family(mark) if "ranks.py" in cmdline(identity.pid)]
    return child


def cmdline(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def driver_of(cluster: Cluster, job_id: str) -> psutil.Process:
    """Return the driver's Python process, not the shell around it."""
    processes = cluster.processes(f"/{job_id}/logs/attempt-1/order.json")
    return next(process for process in processes if "python" in process.name())


def test_servers_and_a_driver_are_killed(
    start_server: Callable[..., Server], cluster: Cluster
) -> None:
    """The same processes continue; one job ends while no server runs; one is retried."""
    server, history = start_server(slots=3), History()
    with DistillClient(server.address) as client:
        names = ["pause=0.05 n=0", "pause=0.05 n=1 orphan=1", "fail_at=20 pause=0.2"]
        jobs = []
        for number, name in enumerate(names):
            jobs.append(client.submit(job_config(name, 1_000_000), idempotency_key=f"key {number}"))
            history.submitted(f"key {number}", jobs[-1].id)
        running_ids = [job.id for job in jobs[:2]]
        for job_id in running_ids:
            eventually(lambda j=job_id: client.get(j).step > 0)
        shims = [card_of(wait_for_shim(server, job_id)) for job_id in running_ids]
        for _ in range(KILLS):
            steps = [client.get(job_id).step for job_id in running_ids]
            server.kill()
            server.start()
            for job_id, step in zip(running_ids, steps, strict=True):
                eventually(lambda j=job_id, s=step: client.get(j).step > s)
        assert [card_of(wait_for_shim(server, job_id)) for job_id in running_ids] == shims
        assert all(card and identity_of(card.shim.pid) == card.shim for card in shims)
        mark = mark_of(wait_for_shim(server, running_ids[1]))
        driver_of(cluster, running_ids[1]).kill()
        eventually(lambda: not family(mark))
        wait_for_shim(server, running_ids[1], attempt=2)
        for job_id in running_ids:
            client.cancel(job_id)
        final_jobs = [client.wait(job.id, timeout=PATIENCE) for job in jobs]
        assert [(job.state, job.attempt) for job in final_jobs] == [
            (JobState.CANCELLED, 1),
            (JobState.CANCELLED, 2),
            (JobState.FAILED, 1),
        ]
        check(history, server, client, jobs)


class RayServer(RealServer):
    """`python -m distill_server --ray` with the real trainer."""

    def __init__(self, runs: Path, address: str, *options: str) -> None:
        super().__init__(runs, 1)
        self._address = address
        self._options = options

    def launch(self) -> subprocess.Popen[str]:
        address_options = ["--runs", str(self.runs), "--host", self.host, "--port", str(self.port)]
        database = ["--database", str(self.runs.with_suffix(".sqlite"))]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "distill_server", *address_options, *database),
                *("--ray", self._address, *self._options),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )


def test_two_processes_train(
    cluster: Cluster,
    material: Material,
    teacher: str,
    tmp_path: Path,
) -> None:
    """Bit-identical to `accelerate launch`: the trainer reads the same variables."""
    from tests.student_trainer.tiny import curve, job

    config = job(material, teacher, max_steps=6, train__processes=2, checkpoint__every=6)
    server = RayServer(tmp_path / "runs", cluster.jobs)
    server.start()
    try:
        with DistillClient(server.address) as client:
            final_job = client.wait(client.submit(config).id, timeout=PATIENCE)
            assert final_job.state is JobState.SUCCEEDED, final_job.reason
    finally:
        server.kill()
    run = RunDirectory(server.runs / final_job.id)
    assert (run.logs(1) / "rank-1.log").exists()
    expected = finish(new_run(tmp_path / "run", config))
    assert curve(metrics_of(run)) == curve(metrics_of(expected))
    assert weights(run) == weights(expected)
    assert not (server.runs / "server.sqlite").exists()


def test_the_head_is_killed_and_comes_back_empty(
    start_server: Callable[..., Server], cluster: Cluster
) -> None:
    """Jobs report it, keep their retries and run again; no job has two trainers at once."""
    server, history = start_server(slots=2), History()
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(f"pause=0.05 n={n}", 1_000_000)) for n in range(2)]
        for job in jobs:
            history.submitted("", job.id)
        for job in jobs:
            eventually(lambda job=job: client.get(job.id).step > 0)
        marks = [mark_of(wait_for_shim(server, job.id)) for job in jobs]
        cluster.kill()
        for job in jobs:
            eventually(lambda job=job: "cannot be reached" in client.get(job.id).phase)
            assert client.get(job.id).state is JobState.RUNNING
        for mark in marks:
            eventually(lambda mark=mark: not family(mark))
        server.kill()
        server.start()
        late_job = client.submit(job_config("pause=0.05 late=1", 3))
        history.submitted("", late_job.id)
        cluster.start()
        for job in jobs:
            eventually(lambda job=job: client.get(job.id).attempt == 2)
            wait_for_shim(server, job.id, attempt=2)
            client.cancel(job.id)
        final_jobs = [client.wait(job.id, timeout=PATIENCE) for job in jobs]
        assert {(job.state, job.attempt) for job in final_jobs} == {(JobState.CANCELLED, 2)}
        assert client.wait(late_job.id, timeout=PATIENCE).state is JobState.SUCCEEDED
        check(history, server, client, [*jobs, late_job])
