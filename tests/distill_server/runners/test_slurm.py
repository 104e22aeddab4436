"""Jobs on a Slurm of this machine, with three nodes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobEvent, JobState
from clients.runs.directory import RunDirectory
from distill_server.runners.local.process import family, kill_family
from distill_server.runners.local.shim_files import card_of
from tests.distill_server import conftest
from tests.distill_server.conftest import Server, job_config
from tests.distill_server.jobs.history import History
from tests.documents import ROOT, blocks
from tests.end_to_end.conftest import material, once, teacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import ENVIRONMENT, RealServer, metrics_of, new_run, weights
from tests.slurm_cluster import NODES, SlurmCluster, missing

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# How long the controller is away, and how long squeue lists nothing.
AWAY_SECONDS = float(os.environ.get("DISTILL_SLURM_AWAY", "0"))
if absent := missing() or ("" if AWAY_SECONDS else "it takes minutes: make test-slurm"):
    pytest.skip(absent, allow_module_level=True)

pytestmark = [pytest.mark.timeout(600)]
PATIENCE = 120
__all__ = ["material", "once", "teacher"]


def eventually(condition: Callable[[], object]) -> None:
    conftest.eventually(condition, PATIENCE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    new_cluster = SlurmCluster(gpus=2)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in new_cluster.environment.items():
            environment.setenv(name, value)
            environment.setitem(ENVIRONMENT, name, value)
        yield new_cluster
    new_cluster.close()


@pytest.fixture(autouse=True)
def wait_until_idle(cluster: SlurmCluster) -> Iterator[None]:
    """Cancel all jobs after each test and wait until the cluster is idle."""
    yield
    cluster.call("scancel", "--full", f"--user={os.getuid()}")
    eventually(cluster.is_idle)


StartServer = Callable[..., Server]


@pytest.fixture
def start_server(cluster: SlurmCluster, tmp_path: Path) -> Iterator[StartServer]:
    servers: list[Server] = []

    def start(
        *options: str, runs: Path = tmp_path / "the runs", slots: int = 4, **server_options: object
    ) -> Server:
        servers.append(Server(runs, slots, slurm=options, **server_options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        if server.process is not None:
            server.kill()
        for path in server.runs.rglob("shim.json"):
            if shim_card := card_of(path.parent):
                kill_family(shim_card.mark)


def wait_for_mark(server: Server, job_id: str, attempt: int = 1, rank: int = 0) -> str:
    """Wait until a rank has started; return the mark of its processes."""
    directory = server.runs / job_id / f"logs/attempt-{attempt}/rank-{rank}"
    eventually(lambda: card_of(directory))
    card = card_of(directory)
    assert card is not None
    return card.mark


def check(history: History, server: Server, client: DistillClient, jobs: Sequence[Job]) -> None:
    """Check the rules of the history, and that no order.json with secrets is left."""
    for job in jobs:
        history.submitted("", job.id)
        history.watched(job.id, list(client.watch(job.id)))
    history.check(server.runs, server.slots)
    assert not list(server.runs.rglob("order.json"))


def number_of(cluster: SlurmCluster, job: Job, attempt: int = 1) -> str:
    """Wait until an attempt's job is submitted; return its number in Slurm."""

    def list_numbers() -> list[str]:
        name = re.compile(f"{job.id}-[0-9a-f]{{8}}-{attempt}")
        return [number for number, job_name, _ in cluster.jobs() if name.fullmatch(job_name)]

    eventually(list_numbers)
    (number,) = list_numbers()
    return number


def state_of(cluster: SlurmCluster, number: str) -> str:
    return next(state for job_number, _, state in cluster.jobs() if job_number == number)


def with_processes(config: OnPolicyJob, processes: int) -> OnPolicyJob:
    values = config.model_dump()
    train = {**values["train"], "processes": processes}
    return OnPolicyJob.model_validate({**values, "train": train})


def test_jobs_end_are_tried_again_and_stopped(start_server: StartServer) -> None:
    """The run directory has a space in its name."""
    server, history = start_server(), History()
    scripts = [
        ("pause=0.01", 5),
        ("pause=0.01 crash_at=3 crashes=1 every=2", 5),
        ("pause=0.05", 1_000_000),
        ("hang_at=3 deaf=1 orphan=1", 1_000_000),
    ]
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(script, steps)) for script, steps in scripts]
        good_id, crashing_id, polite_id, deaf_id = (job.id for job in jobs)
        eventually(lambda: client.get(polite_id).step >= 3 and client.get(deaf_id).step >= 2)
        mark = wait_for_mark(server, deaf_id)
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
        second_log = server.runs / crashing_id / "logs/attempt-2/rank-0.log"
        assert "starts after step 2" in second_log.read_text()
        check(history, server, client, jobs)


def test_a_job_that_waits_says_why(cluster: SlurmCluster, start_server: StartServer) -> None:
    server, history = start_server(), History()
    cluster.call("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(name, 5)) for name in ("cancelled", "withdrawn")]
        phase_pattern = re.compile("PENDING in Slurm: (Resources|Priority)")
        for job in jobs:
            eventually(lambda job=job: phase_pattern.fullmatch(client.get(job.id).phase))
            assert client.get(job.id).state is JobState.PREPARING
        client.cancel(jobs[0].id)
        cancelled_job = client.wait(jobs[0].id, timeout=PATIENCE)
        assert (cancelled_job.state, cancelled_job.attempt) == (JobState.CANCELLED, 1)
        assert cancelled_job.reason == "cancelled on request"
        cluster.call("scancel", number_of(cluster, jobs[1]))
        withdrawn_job = client.wait(jobs[1].id, timeout=PATIENCE)
        assert withdrawn_job.state is JobState.CANCELLED
        assert withdrawn_job.reason.startswith("cancelled in Slurm, not through the server")
        check(history, server, client, jobs)


def test_scancel_leaves_a_checkpoint(cluster: SlurmCluster, start_server: StartServer) -> None:
    """scancel ends the job; `distill resume` continues after its last step."""
    server, history = start_server(), History()
    with DistillClient(server.address) as client:
        job = client.submit(job_config("pause=0.05 every=1000000", 1_000_000))
        eventually(lambda: client.get(job.id).step >= 3)
        cluster.call("scancel", number_of(cluster, job))
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert final_job.state is JobState.CANCELLED
        assert final_job.reason.startswith("cancelled in Slurm, not through the server")
        run = RunDirectory(server.runs / job.id)
        assert run.checkpoint_steps() == (final_job.step,)
        client.resume(job.id)
        history.resumed(job.id)
        eventually(lambda: client.get(job.id).step > final_job.step)
        assert f"attempt 2 starts after step {final_job.step}" in run.log_file(2).read_text()
        client.cancel(job.id)
        assert client.wait(job.id, timeout=PATIENCE).reason == "cancelled on request"
        check(history, server, client, [job])


def queued_again(client: DistillClient, job: Job) -> JobEvent:
    """Wait for the job's second attempt; return its first event."""
    eventually(lambda: client.get(job.id).attempt == 2)
    return next(event for event in client.history(job.id) if event.attempt == 2)


@pytest.mark.parametrize("partition", ["work", "strict"])
def test_preemption_costs_no_retry(
    cluster: SlurmCluster, start_server: StartServer, partition: str
) -> None:
    """With and without grace time in Slurm; the job waits for resources and continues."""
    server, history = start_server(f"partition={partition}", "exclusive", retries=0), History()
    with DistillClient(server.address) as client:
        job = client.submit(with_processes(job_config("pause=0.05 every=1000000", 1_000_000), 1))
        eventually(lambda: client.get(job.id).step >= 3)
        cluster.call(*URGENT, "--wrap=sleep 1000")
        requeue_event = queued_again(client, job)
        assert (
            "preempted" in requeue_event.reason or "stopped by SIGTERM" in requeue_event.reason
        ), requeue_event.reason
        run = RunDirectory(server.runs / job.id)
        assert run.checkpoint_steps() == (requeue_event.step,)
        eventually(lambda: client.get(job.id).phase.startswith("PENDING in Slurm"))
        cluster.call("scancel", "--partition=urgent")
        eventually(lambda: client.get(job.id).step > requeue_event.step)
        client.cancel(job.id)
        assert client.wait(job.id, timeout=PATIENCE).reason == "cancelled on request"
        check(history, server, client, [job])


URGENT = ("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null")


def test_a_node_that_fails_costs_no_retry(cluster: SlurmCluster, start_server: StartServer) -> None:
    server, history = start_server("nodelist=n2", retries=0), History()
    with DistillClient(server.address) as client:
        job = client.submit(job_config("pause=0.05", 1_000_000))
        eventually(lambda: client.get(job.id).step >= 3)
        cluster.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        assert "NODE_FAIL" in queued_again(client, job).reason
        # The node comes back by itself: its slurmd is alive (ReturnToService).
        eventually(lambda: client.get(job.id).state is JobState.RUNNING)
        client.cancel(job.id)
        assert client.wait(job.id, timeout=PATIENCE).state is JobState.CANCELLED
        check(history, server, client, [job])


RANKS = """
import os, subprocess, time
print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)
subprocess.Popen(['sleep', '1000'], start_new_session=True)
time.sleep(1000)
"""


def test_a_killed_rank_frees_its_nodes(cluster: SlurmCluster, start_server: StartServer) -> None:
    """The attempt ends and no process is left, not even one in a session of its own."""
    server, history = start_server(ranks=RANKS, retries=0, threads=8), History()
    with DistillClient(server.address) as client:
        job = client.submit(with_processes(job_config("ranks"), 2))
        marks = [wait_for_mark(server, job.id, rank=rank) for rank in (0, 1)]
        for mark in marks:
            eventually(lambda mark=mark: len(family(mark)) == 2)
        (victim,) = [
            identity for identity in family(marks[1]) if "ranks.py" in cmdline(identity.pid)
        ]
        os.kill(victim.pid, signal.SIGKILL)
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert final_job.state is JobState.FAILED
        assert final_job.reason.startswith("the trainer was killed by signal 9")
        assert final_job.reason.endswith("process 1 ended first, with code -9")
        for mark in marks:
            eventually(lambda mark=mark: not family(mark))
        eventually(cluster.is_idle)
        check(history, server, client, [job])


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


PLACES = """
import os
names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'OMP_NUM_THREADS')
print(*(os.environ[name] for name in names), os.environ.get('CUDA_VISIBLE_DEVICES'))
secrets = [name for name in os.environ if name.startswith('SECRET')]
assert not secrets, secrets
"""


@pytest.mark.parametrize("gpus", [None, 3])
def test_places_of_ranks(
    cluster: SlurmCluster,
    start_server: StartServer,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int | None,
) -> None:
    """The variables of torchrun for three processes, two per node. No GPUs without --gpus."""
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "1")
    share = {} if gpus is None else {"gpus": gpus}
    server, history = start_server(ranks=PLACES, retries=0, threads=6, **share), History()
    with DistillClient(server.address) as client:
        job = client.submit(with_processes(job_config("places"), 3))
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert final_job.reason.startswith("the trainer exited with code 0 without a final status")
        logs = [server.runs / job.id / f"logs/attempt-1/rank-{rank}.log" for rank in range(3)]
        visible_devices = ["0,1", "0,1", "0"] if gpus else ["None"] * 3
        assert [log.read_text() for log in logs] == [
            f"0 3 0 2 2 {visible_devices[0]}\n",
            f"1 3 1 2 2 {visible_devices[1]}\n",
            f"2 3 0 1 2 {visible_devices[2]}\n",
        ]
        check(history, server, client, [job])


def test_a_job_that_slurm_refuses_fails(start_server: StartServer) -> None:
    server, history = start_server("partition=nowhere"), History()
    with DistillClient(server.address) as client:
        job = client.submit(job_config("refused"))
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert (final_job.state, final_job.attempt) == (JobState.FAILED, 2)
        assert final_job.reason.startswith("Slurm refused the job: sbatch: error:")
        assert final_job.reason.endswith("Invalid partition name specified")
        check(history, server, client, [job])


def test_a_directory_that_is_not_shared(cluster: SlurmCluster, start_server: StartServer) -> None:
    """One of the nodes does not have the directory."""
    options = f"nodelist={NODES[-1]}"
    server = start_server(options, runs=cluster.unshared / "runs", retries=0)
    with DistillClient(server.address) as client:
        job = client.submit(job_config("not shared"))
        final_job = client.wait(job.id, timeout=PATIENCE)
        assert final_job.state is JobState.FAILED
        assert "nothing appeared in its run directory: --runs and the server's" in final_job.reason


def test_the_controller_is_away(cluster: SlurmCluster, start_server: StartServer) -> None:
    """Jobs continue and report it; one succeeds meanwhile; one submitted meanwhile starts later."""
    server, history = start_server(), History()
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(f"pause={p}", n)) for p, n in ((0.05, 10**6), (0.2, 20))]
        for job in jobs:
            eventually(lambda job=job: client.get(job.id).step > 0)
        cluster.kill_controller()
        try:
            start_time = time.monotonic()
            eventually(lambda: client.get(jobs[0].id).phase.startswith("Slurm cannot be reached"))
            assert client.wait(jobs[1].id, timeout=PATIENCE).state is JobState.SUCCEEDED
            jobs.append(client.submit(job_config("late", 3)))
            server.kill()
            server.start()
            step = client.get(jobs[0].id).step
            eventually(lambda: client.get(jobs[0].id).step > step)
            time.sleep(max(0.0, AWAY_SECONDS - (time.monotonic() - start_time)))
            assert client.get(jobs[2].id).state in (JobState.PREPARING, JobState.QUEUED)
        finally:
            cluster.start_controller()
        final_job = client.wait(jobs[2].id, timeout=PATIENCE)
        assert (final_job.state, final_job.attempt) == (JobState.SUCCEEDED, 1)
        assert client.get(jobs[0].id).attempt == 1
        client.cancel(jobs[0].id)
        assert client.wait(jobs[0].id, timeout=PATIENCE).reason == "cancelled on request"
        check(history, server, client, jobs)


def test_squeue_lists_nothing(
    cluster: SlurmCluster,
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running and waiting jobs are not given up; a restarted server waits, too."""
    silent_mark = tmp_path / "silent"
    real_squeue = subprocess.check_output(["which", "squeue"], text=True).strip()
    fake_squeue = tmp_path / "bin" / "squeue"
    fake_squeue.parent.mkdir()
    fake_squeue.write_text(f'#!/bin/sh\n[ -e "{silent_mark}" ] || exec {real_squeue} "$@"\n')
    fake_squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake_squeue.parent}:{os.environ['PATH']}")
    server, history = start_server(threads=2), History()
    with DistillClient(server.address) as client:
        running_job = client.submit(job_config("pause=0.05", 10**6))
        eventually(lambda: client.get(running_job.id).step > 0)
        fill(cluster, 9)
        waiting_job = client.submit(job_config("pause=0.05", 5))
        eventually(lambda: client.get(waiting_job.id).phase.startswith("PENDING in Slurm"))
        silent_mark.touch()
        for job in (running_job, waiting_job):
            eventually(lambda job=job: client.get(job.id).phase.startswith("squeue does not list"))
        time.sleep(AWAY_SECONDS)
        server.kill()
        server.start()
        time.sleep(AWAY_SECONDS)
        silent_mark.unlink()
        cluster.call("scancel", "--name=filling")
        final_job = client.wait(waiting_job.id, timeout=PATIENCE)
        assert (final_job.state, final_job.attempt) == (JobState.SUCCEEDED, 1)
        assert client.get(running_job.id).attempt == 1
        client.cancel(running_job.id)
        assert client.wait(running_job.id, timeout=PATIENCE).reason == "cancelled on request"
        check(history, server, client, [running_job, waiting_job])


def fill(cluster: SlurmCluster, cpus: int) -> None:
    """Occupy free CPUs; the nodes have twelve."""
    options = ["--job-name=filling", f"--ntasks={cpus}", "--output=/dev/null"]
    cluster.call("sbatch", *options, "--wrap=sleep 1000")


def test_servers_are_killed(cluster: SlurmCluster, start_server: StartServer) -> None:
    """The same processes continue; one job ends while no server runs; one stays queued."""
    server, history = start_server(slots=3, threads=2), History()
    with DistillClient(server.address) as client:
        names = [("pause=0.05", 10**6), ("fail_at=20 pause=0.2", 10**6)]
        jobs = [client.submit(job_config(*name)) for name in names]
        for job in jobs:
            eventually(lambda job=job: client.get(job.id).step > 0)
        mark = wait_for_mark(server, jobs[0].id)
        fill(cluster, 8)
        fill(cluster, 2)  # takes the CPUs of the job that fails
        jobs.append(client.submit(job_config("waits", 3)))
        number = number_of(cluster, jobs[2])
        for _ in range(3):
            step = client.get(jobs[0].id).step
            server.kill()
            server.start()
            eventually(lambda step=step: client.get(jobs[0].id).step > step)
        assert wait_for_mark(server, jobs[0].id) == mark
        assert number_of(cluster, jobs[2]) == number
        cluster.call("scancel", "--name=filling")
        assert client.wait(jobs[2].id, timeout=PATIENCE).state is JobState.SUCCEEDED
        client.cancel(jobs[0].id)
        final_jobs = [client.wait(job.id, timeout=PATIENCE) for job in jobs]
        assert [(job.state, job.attempt) for job in final_jobs] == [
            (JobState.CANCELLED, 1),
            (JobState.FAILED, 1),
            (JobState.SUCCEEDED, 1),
        ]
        check(history, server, client, jobs)


class SlurmServer(RealServer):
    """`python -m distill_server --slurm` with the real trainer; a process has one thread."""

    def launch(self) -> subprocess.Popen[str]:
        address_options = ["--runs", str(self.runs), "--host", self.host, "--port", str(self.port)]
        options = ["--slurm", "--slurm-option", "ntasks-per-node=2"]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "distill_server",
                *address_options,
                *options,
                "--backoff",
                "0.5",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )


@pytest.mark.parametrize("processes", [1, 4])
def test_a_preempted_job_resumes_to_the_same_bits(
    cluster: SlurmCluster, material: Material, teacher: str, tmp_path: Path, processes: int
) -> None:
    """One process; and 2 x 2 over gloo with FSDP2, two on each of two nodes.

    With DDP, four processes that resume differ in the last bits, also without Slurm.
    """
    from tests.student_trainer.tiny import curve, job

    sharding = "fsdp2" if processes > 1 else "none"
    process_settings = {"train__processes": processes, "train__sharding": sharding}
    config = job(material, teacher, max_steps=100, **process_settings)
    server = SlurmServer(tmp_path / "runs", 1)
    server.start()
    try:
        with DistillClient(server.address) as client:
            submitted_job = client.submit(config)
            eventually(lambda: client.get(submitted_job.id).step >= 2)
            cluster.call(*URGENT, "--job-name=urgent", "--wrap=sleep 1")
            final_job = client.wait(submitted_job.id, timeout=2 * PATIENCE)
            assert final_job.state is JobState.SUCCEEDED, final_job.reason
            assert final_job.attempt == 2
    finally:
        server.kill()
    run = RunDirectory(server.runs / final_job.id)
    assert len(list(run.logs(2).glob("rank-*.log"))) == processes
    expected = finish(new_run(tmp_path / "run", config))
    assert curve(metrics_of(run)) == curve(metrics_of(expected))
    assert weights(run) == weights(expected)


@pytest.mark.skipif(AWAY_SECONDS < 60, reason="a limit of Slurm is a minute")
def test_the_time_limit_costs_no_retry(start_server: StartServer) -> None:
    server, history = start_server("time=1", retries=0), History()
    with DistillClient(server.address) as client:
        job = client.submit(job_config("pause=0.05 every=1000000", 1_000_000))
        requeue_event = queued_again(client, job)
        assert "time limit" in requeue_event.reason
        eventually(lambda: client.get(job.id).step > requeue_event.step)
        log = (server.runs / job.id / "logs/attempt-2/rank-0.log").read_text()
        assert f"attempt 2 starts after step {requeue_event.step}\n" in log
        client.cancel(job.id)
        assert client.wait(job.id, timeout=PATIENCE).reason == "cancelled on request"
        check(history, server, client, [job])


def test_the_server_of_the_documents(
    cluster: SlurmCluster, material: Material, teacher: str, tmp_path: Path
) -> None:
    """The documented command with other paths and a free port runs a job."""
    from tests.student_trainer.tiny import job

    (block,) = blocks("docs/slurm.md", "slurm")
    _, line = block.commands  # the first one is for a teacher with TLS
    program, *words = shlex.split(line)
    assert program == ".venv/bin/distill-server"
    replacements = {"/shared/runs": "runs", "/var/lib/distill/server.sqlite": "server.sqlite"}
    options = [
        str(tmp_path / replacements[word]) if word in replacements else word for word in words
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "distill_server", *options, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[-1]
            with DistillClient(address) as client:
                config = job(material, teacher, max_steps=2, resources__gpus=1)
                final_job = client.wait(client.submit(config).id, timeout=PATIENCE)
                assert final_job.state is JobState.SUCCEEDED, final_job.reason
        finally:
            server.kill()
    script = (tmp_path / "runs" / final_job.id / "logs/attempt-1/job.sbatch").read_text()
    for option in ("--gpus-per-task=1", "--cpus-per-task=2", "--time=2-00:00:00"):
        assert f"#SBATCH {option}\n" in script


def test_the_script_of_the_documents(
    cluster: SlurmCluster, material: Material, teacher: str, tmp_path: Path
) -> None:
    """Cancelled and submitted again: same bits as an undisturbed run; a third run does nothing."""
    from tests.student_trainer.tiny import curve, job

    (block,) = blocks("docs/slurm.md", "slurm-script")
    command, script, file, directory = shlex.split(block.commands[0])
    assert (command, file, directory) == ("sbatch", "job.toml", "/shared/runs/my-run")
    config = job(material, teacher, max_steps=60)
    (tmp_path / "job.yaml").write_text(config.model_dump_json())
    distill = tmp_path / "bin" / "distill"
    distill.parent.mkdir()
    distill.write_text(f'#!/bin/sh\nexec {sys.executable} -m clients "$@"\n')
    distill.chmod(0o755)
    run = RunDirectory(tmp_path / "runs" / "my-run")

    def submit() -> str:
        words = [
            command,
            "--parsable",
            "--cpus-per-task=1",
            f"--output={tmp_path}/%j.log",
            str(ROOT / script),
        ]
        words += [str(tmp_path / "job.yaml"), str(run.path)]
        path = f"{distill.parent}:{os.environ['PATH']}"
        process = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=True,
            env={**ENVIRONMENT, "PATH": path},
        )
        return process.stdout.strip()

    def wait_for_end(number: str) -> str:
        end_states = ("COMPLETED", "CANCELLED", "FAILED")
        eventually(lambda: state_of(cluster, number) in end_states)
        return state_of(cluster, number)

    first_number = submit()
    eventually(lambda: len(metrics_of(run)) >= 2)
    cluster.call("scancel", first_number)
    assert wait_for_end(first_number) == "CANCELLED"
    log_text = (tmp_path / f"{first_number}.log").read_text()
    eventually(cluster.is_idle)
    status = run.read_status()
    assert status is not None
    assert status.verdict == "cancelled", log_text
    assert run.checkpoint_steps()[-1] == status.step
    second_number = submit()
    assert wait_for_end(second_number) == "COMPLETED", (
        tmp_path / f"{second_number}.log"
    ).read_text()
    third_number = submit()
    assert wait_for_end(third_number) == "COMPLETED"
    assert "is finished: 60 of 60 steps" in (tmp_path / f"{third_number}.log").read_text()
    expected = finish(new_run(tmp_path / "run", config))
    assert curve(metrics_of(run)) == curve(metrics_of(expected))
    assert weights(run) == weights(expected)
