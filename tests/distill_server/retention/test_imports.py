"""Import of run directories into a server, with their states, steps and checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobState
from clients.jobs.record import points_of
from clients.runs.directory import RunDirectory, Status
from distill_server.jobs.database import open_database
from distill_server.retention.imports import import_runs
from protos.errors import InvalidInput
from protos.rpc.failpoints import VARIABLE
from tests.distill_server.conftest import Server, end_attempt, eventually, job_config

NAMES = {
    "good": JobState.SUCCEEDED,
    "bad fail_at=3": JobState.FAILED,
    "retried crash_at=7 crashes=1": JobState.SUCCEEDED,
    "stopped hang_at=7 hangs=1": JobState.CANCELLED,
}

COUNTED = "--keep-days of a server counts from this import"


def run_import(runs: Path, source: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distill_server", "--runs", str(runs), "--import", str(source)]
    environment = {**os.environ, VARIABLE: failpoint}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def facts(job: Job) -> tuple[object, ...]:
    return (
        *(job.name, job.kind, job.state, job.reason, job.attempt, job.step, job.max_steps),
        *(job.metrics, job.config_json, job.checkpoints, job.labels),
    )


@pytest.fixture
def lost_database(
    make_server: Callable[..., Server],
) -> tuple[Server, dict[str, Job], dict[str, object]]:
    """A server whose database was deleted, its jobs, and their metrics."""
    server = make_server(slots=4)
    with DistillClient(server.address) as client:
        jobs = [client.submit(job_config(name, max_steps=12)) for name in NAMES]
        eventually(lambda: client.get(jobs[-1].id).step >= 6)
        jobs[-1].cancel()
        final_jobs = {job.id: client.wait(job.id, 60) for job in jobs}
        points = {job_id: points_of(client.history(job_id)) for job_id in final_jobs}
    assert [job.state for job in final_jobs.values()] == [*NAMES.values()]
    server.kill(signal.SIGTERM)
    for file in server.runs.glob("server.*"):
        file.unlink()
    return server, dict(final_jobs), dict(points)


def check(server: Server, jobs: dict[str, Job], points: dict[str, object]) -> None:
    server.start()
    with DistillClient(server.address) as client:
        assert {job.id for job in client.list()} == jobs.keys()
        for job_id, job in jobs.items():
            imported_job = client.get(job_id)
            assert facts(imported_job) == facts(job)
            assert points_of(client.history(job_id)) == points[job_id]
            assert abs(imported_job.created_at - job.created_at) < 100
            assert 0 < imported_job.created_at <= imported_job.started_at <= imported_job.ended_at
        cancelled_job = next(job for job in jobs.values() if job.state is JobState.CANCELLED)
        resumed_job = client.resume(cancelled_job.id)
        assert resumed_job.attempt == cancelled_job.attempt + 1
        assert client.wait(cancelled_job.id, 60).state is JobState.SUCCEEDED
        steps = [point.step for point in points_of(client.history(cancelled_job.id))]
        assert steps == [*range(1, 13)]


def test_a_lost_database(
    lost_database: tuple[Server, dict[str, Job], dict[str, object]], tmp_path: Path
) -> None:
    """The run directories stay in place."""
    server, jobs, points = lost_database
    (server.runs / "notes").mkdir()
    process = run_import(server.runs, server.runs)
    assert process.returncode == 1
    lines = process.stdout.splitlines()
    assert sum(line.startswith("taken ") for line in lines) == len(jobs), process.stdout
    assert [line for line in lines if not line.startswith("taken ")] == [
        f"refused  notes: {server.runs / 'notes'} is not a run directory; a run directory has a"
        f" job.json"
    ]
    assert process.stderr.splitlines() == ["4 taken, 0 known, 1 refused", COUNTED]
    (server.runs / "notes").rmdir()
    second_import = run_import(server.runs, server.runs)
    assert (second_import.returncode, second_import.stderr) == (0, "0 taken, 4 known, 0 refused\n")
    check(server, jobs, points)
    assert run_import(server.runs, server.runs).returncode == 2, "the server is running"
    export = tmp_path / "pulled"
    good_job = next(job for job in jobs.values() if job.name == "good")
    with DistillClient(server.address) as client:
        client.pull(good_job.id, export)
    model = (server.runs / good_job.id / "export" / "nested" / "model.bin").read_bytes()
    assert (export / "nested" / "model.bin").read_bytes() == model


@pytest.mark.slow
def test_into_another_server_and_killed(
    lost_database: tuple[Server, dict[str, Job], dict[str, object]], tmp_path: Path
) -> None:
    """The import is killed after the first and the second copy; the next one repeats the copy."""
    old_server, jobs, points = lost_database
    new_server = Server(tmp_path / "new", slots=4)
    try:
        for count in (1, 2):
            process = run_import(new_server.runs, old_server.runs, f"run-imported:kill:{count}")
            assert process.returncode == -signal.SIGKILL
        assert len([*new_server.runs.glob("on-policy-*")]) == 2
        (new_server.runs / ".leftover").mkdir()
        process = run_import(new_server.runs, old_server.runs)
        assert (process.returncode, process.stderr) == (
            0,
            f"3 taken, 1 known, 0 refused\n{COUNTED}\n",
        )
        check(new_server, jobs, points)
    finally:
        new_server.clean_up()
    assert all((old_server.runs / job_id / "job.json").exists() for job_id in jobs), (
        "they were copied"
    )


def test_what_has_not_ended(make_server: Callable[..., Server]) -> None:
    """A run with a running trainer is refused; a killed run is imported and can be resumed."""
    server = make_server(slots=2)
    with DistillClient(server.address) as client:
        configs = [job_config(f"{n} hang_at=7 hangs=1 every=2", max_steps=9) for n in (1, 2)]
        killed_id, running_id = (client.submit(config).id for config in configs)
        eventually(lambda: {client.get(job_id).step for job_id in (killed_id, running_id)} == {6})
    server.kill()
    end_attempt(server.runs / killed_id / "logs" / "attempt-1")
    for file in server.runs.glob("server.*"):
        file.unlink()
    eventually(lambda: f"taken    {killed_id}" in run_import(server.runs, server.runs).stdout)
    output = run_import(server.runs, server.runs).stdout
    assert f"known    {killed_id}: CANCELLED" in output
    assert f"refused  {running_id}: a program is running in this directory" in output
    end_attempt(server.runs / running_id / "logs" / "attempt-1")
    eventually(lambda: f"taken    {running_id}" in run_import(server.runs, server.runs).stdout)
    server.start()
    with DistillClient(server.address) as client:
        for job_id in (killed_id, running_id):
            assert client.get(job_id).reason == "imported before it had ended"
            client.resume(job_id)
            assert client.wait(job_id, timeout=60).state is JobState.SUCCEEDED
            steps = [point.step for point in points_of(client.history(job_id))]
            assert steps == [*range(1, 10)]


def test_what_is_refused(tmp_path: Path) -> None:
    source, runs = tmp_path / "source", tmp_path / "runs"
    runs.mkdir()
    for name in ("My run", "future", "pipe", "taken", "x" * 101):
        RunDirectory.create(source / name, job_config(name[:9]))
    (source / "future" / "job.json").write_text('{"name": "x", "method": {"type": "magic"}}')
    os.mkfifo(source / "pipe" / "samples")
    RunDirectory.create(runs / "taken", job_config("another"))
    (source / ".hidden").mkdir()
    (source / "file").touch()
    with open_database(runs / "server.sqlite") as connection:
        entries = {entry.name: entry for entry in import_runs(connection, runs, source)}
        with pytest.raises(InvalidInput, match="no such directory"):
            next(import_runs(connection, runs, source / "none"))
        with pytest.raises(InvalidInput, match="is a run directory; give its parent directory"):
            next(import_runs(connection, runs, source / "taken"))
    assert {entry.outcome for entry in entries.values()} == {"refused"}
    for name, reason in (
        (
            "My run",
            "the name of the directory is not a valid job id; rename the directory: up to"
            " 100 of a-z",
        ),
        ("x" * 101, "the name of the directory is not a valid job id"),
        ("future", "this version cannot read the job"),
        ("pipe", "is a named pipe"),
        ("taken", f"{runs / 'taken'} already exists; move {runs / 'taken'} away"),
    ):
        assert reason in entries.pop(name).about, name
    assert not entries
    assert sorted(path.name for path in runs.iterdir() if path.is_dir()) == ["taken"]
    shutil.rmtree(runs / "taken")
    (source / "taken" / "logs" / "attempt-999999999").mkdir(parents=True)
    with open_database(runs / "server.sqlite") as connection:
        (imported_entry,) = [
            entry for entry in import_runs(connection, runs, source) if entry.name == "taken"
        ]
    assert (imported_entry.outcome, imported_entry.about) == ("taken", "CANCELLED 0/5")


def test_faulty_directories_do_not_end_an_import(tmp_path: Path) -> None:
    """Each faulty directory has a line in the output; the others are imported."""
    source, runs = tmp_path / "source", tmp_path / "runs"
    huge = "99999999999999999999"
    files = {
        "status-attempt": ("status.json", '{"attempt": 0, "verdict": "running"}'),
        "status-step": ("status.json", f'{{"attempt": 1, "verdict": "failed", "step": {huge}}}'),
        "status-huge": ("status.json", f'{{"attempt": {huge}, "verdict": "failed"}}'),
        "metrics-step": ("metrics.jsonl", f'{{"attempt": 1, "step": {huge}, "loss": 1.0}}\n'),
        "utf-8": ("job.json", '{"name": "\udcff", "method": {"type": "on_policy"}}'),
        "a": ("metrics.jsonl", "[" * 200_000 + '\n{"attempt": 1, "step": 1, "loss": 1.0}\n'),
    }
    for name in (*files, "job-pipe", "lock-pipe", "no-times", "z"):
        RunDirectory.create(source / name, job_config(name))
    for name, (file, text) in files.items():
        (source / name / file).write_text(text, errors="surrogateescape")
    (source / "job-pipe" / "job.json").unlink()
    for pipe in ("job-pipe/job.json", "lock-pipe/.trainer.lock"):
        os.mkfifo(source / pipe)
    # These fail at the first access of a directory, also for root, who ignores file modes.
    (source / "no-times" / "status.json").symlink_to("x" * 300)
    (source / "no-directory").symlink_to("x" * 300)
    (source / "closed").mkdir(mode=0)
    process = run_import(runs, source)
    lines = dict(line.split(": ", 1) for line in process.stdout.splitlines())
    assert lines.pop("taken    a") == "CANCELLED 1/5"
    assert lines.pop("taken    z") == "CANCELLED 0/5"
    for name, reason in (
        ("status-attempt", "status.json: attempt is 0; write a whole number from 1 to"),
        ("status-step", f"status.json: step is {huge}; write a whole number"),
        ("status-huge", f"status.json: attempt is {huge}; write a whole number"),
        ("metrics-step", f"metrics.jsonl: step is {huge}; write a whole number"),
        ("utf-8", "job.json: Invalid JSON: invalid unicode code point"),
        ("job-pipe", "job.json: not a regular file"),
        ("lock-pipe", ".trainer.lock: not a regular file"),
        ("no-times", "status.json: File name too long"),
        ("no-directory", "File name too long"),
        ("closed", "a run directory has a job.json" if os.geteuid() == 0 else "Permission denied"),
    ):
        assert reason in lines.pop(f"refused  {name}"), name
    assert not lines
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert sorted(path.name for path in runs.iterdir() if path.is_dir()) == ["a", "z"]


@pytest.mark.slow
def test_a_repaired_directory_is_read_again(tmp_path: Path) -> None:
    """A repaired or continued run is copied anew; directories of other origin stay."""
    source, runs = tmp_path / "source", tmp_path / "runs"
    for name in ("broken", "later"):
        RunDirectory.create(source / name, job_config(name))
    broken_run, later_run = (RunDirectory(source / name) for name in ("broken", "later"))
    broken_run.write_status(Status(attempt=0, verdict="running"))
    process = run_import(runs, source, "run-imported:kill:2")
    assert process.returncode == -signal.SIGKILL
    assert (runs / "later").exists()
    assert not (runs / "broken").exists()
    refused_import = run_import(runs, runs)
    assert "refused  later: the directory will be deleted" in refused_import.stdout
    assert (runs / "later").exists()
    broken_run.write_status(Status(attempt=2, verdict="failed", reason="mended", step=3))
    later_run.write_status(Status(attempt=1, verdict="succeeded", step=5))
    later_run.metrics.write_text('{"attempt": 1, "step": 5, "loss": 1.0}\n')
    later_run.path.chmod(0o755)
    process = run_import(runs, source)
    assert sorted(process.stdout.splitlines()) == [
        "taken    broken: FAILED 3/5",
        "taken    later: SUCCEEDED 5/5",
    ]
    assert (runs / "later" / "metrics.jsonl").read_bytes() == later_run.metrics.read_bytes()
    assert stat.S_IMODE((runs / "later").stat().st_mode) == 0o700, "for its owner only"
    with open_database(runs / "server.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM removals").fetchone()[0] == 0


def test_the_next_server_deletes_what_a_killed_import_copied(tmp_path: Path) -> None:
    source, new_server = tmp_path / "source", Server(tmp_path / "new")
    RunDirectory.create(source / "one", job_config("one"))
    assert run_import(new_server.runs, source, "run-imported:kill").returncode == -signal.SIGKILL
    assert (new_server.runs / "one" / "job.json").exists()
    try:
        new_server.start()
        eventually(lambda: not (new_server.runs / "one").exists())
        with DistillClient(new_server.address) as client:
            assert not [*client.list()]
        new_server.kill(signal.SIGTERM)
        assert run_import(new_server.runs, source).stdout == "taken    one: CANCELLED 0/5\n"
    finally:
        new_server.clean_up()


def test_keep_days_count_from_the_import(tmp_path: Path) -> None:
    """Of two runs that ended 100 days ago, the one that was imported 31 days ago is removed."""
    server, day = Server(tmp_path / "runs", keep_days=30), 24 * 3600
    end_time = time.time() - 100 * day
    for name in ("first", "now"):
        run = RunDirectory.create(server.runs / name, job_config(name))
        run.write_status(Status(attempt=1, verdict="succeeded", step=5))
        for file in run.path.iterdir():
            os.utime(file, (end_time, end_time))
    process = run_import(server.runs, server.runs)
    assert process.stderr == f"2 taken, 0 known, 0 refused\n{COUNTED}\n"
    with open_database(server.runs / "server.sqlite") as connection:
        connection.execute(
            "UPDATE jobs SET imported_at = imported_at - ? WHERE id = 'first'", (31 * day,)
        )
    try:
        server.start()
        with DistillClient(server.address) as client:
            eventually(lambda: [job.id for job in client.list()] == ["now"])
            assert abs(client.get("now").ended_at - end_time) < 5, "the end of the run is kept"
        eventually(lambda: not (server.runs / "first").exists())
        assert (server.runs / "now" / "job.json").exists()
    finally:
        server.clean_up()
