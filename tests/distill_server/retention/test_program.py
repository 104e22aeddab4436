"""`distill rm`, `pin` and `cancel --all` against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from distill_server.jobs.database import open_database
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.retention.removals import Removals
from protos.errors import ExitCode, NotFound
from tests.distill_server.conftest import Server, eventually, job_config

Capture = pytest.CaptureFixture[str]


def test_the_commands(server: Server, client: DistillClient, capsys: Capture) -> None:
    def distill(*arguments: str) -> int:
        capsys.readouterr()
        return main(["--server", server.address, *arguments])

    finished_jobs = [client.submit(job_config(f"done-{n}", max_steps=2)) for n in range(3)]
    for job in finished_jobs:
        assert job.wait(60).state is JobState.SUCCEEDED
    long_job = client.submit(job_config("long", max_steps=10_000))
    waiting = [client.submit(job_config(f"waiting-{n}")) for n in range(2)]
    assert distill("rm", long_job.id, "--yes") == ExitCode.WRONG_STATE
    assert "cannot be removed; cancel the job" in capsys.readouterr().err
    assert distill("cancel", "--all", "--state", "QUEUED", "--older-than", "1d") == 0
    assert capsys.readouterr().err == "no jobs\n"
    assert distill("cancel", "--state", "QUEUED") == 0
    states = {job.id: job.state for job in client.list()}
    assert all(states[job.id] is JobState.CANCELLED for job in waiting)
    assert states[long_job.id] in (JobState.PREPARING, JobState.RUNNING)

    assert distill("pin", finished_jobs[0].id) == 0
    assert capsys.readouterr().out == f"{finished_jobs[0].id} pinned\n"
    assert distill("rm", "--all") == ExitCode.USAGE
    assert "--yes: permanently removes 5 jobs; pass --yes to confirm" in capsys.readouterr().err
    assert distill("--json", "rm", "--all", "--yes") == ExitCode.WRONG_STATE
    output = capsys.readouterr()
    removed_ids = {job["id"] for job in json.loads(output.out)["jobs"]}
    assert removed_ids == {job.id for job in (*finished_jobs[1:], *waiting)}, (
        "the rest, in spite of the error"
    )
    assert "is pinned" in output.err
    remaining_names = {path.name for path in server.runs.glob("on-policy-*")}
    eventually(
        lambda: (
            {p.name for p in server.runs.glob("on-policy-*")} == {long_job.id, finished_jobs[0].id}
        )
    )
    assert remaining_names >= {long_job.id, finished_jobs[0].id}
    with pytest.raises(NotFound):
        client.get(finished_jobs[1].id)
    assert distill("pin", "--off", finished_jobs[0].id) == 0
    assert distill("rm", finished_jobs[0].id, "--yes") == 0
    assert capsys.readouterr().out == f"{finished_jobs[0].id} removed\n"
    assert distill("cancel", "--all", "--now") == 0
    assert long_job.wait(60).state is JobState.CANCELLED
    assert distill("resume", "--all", "--older-than", "1d") == 0
    assert capsys.readouterr().err == "no jobs\n"


@pytest.mark.parametrize("offset", [-3600.0, 3600.0])
def test_the_clock_of_the_client_does_not_count(
    offset: float,
    server: Server,
    client: DistillClient,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = client.submit(job_config(max_steps=2))
    assert job.wait(60).state is JobState.SUCCEEDED
    clock = SimpleNamespace(time=lambda: time.time() + offset)
    for module in ("chosen_jobs", "commands.jobs"):  # gRPC keeps its deadlines
        monkeypatch.setattr(f"clients.cli.{module}.time", clock, raising=False)
    assert main(["--server", server.address, "ls"]) == 0
    assert f" -{abs(offset):.0f}" not in capsys.readouterr().out
    assert main(["--server", server.address, "rm", "--all", "--yes", "--older-than", "1m"]) == 0
    assert capsys.readouterr().err == "no jobs\n"
    assert main(["--server", server.address, "rm", "--all", "--yes"]) == 0
    assert capsys.readouterr().out == f"{job.id} removed\n"


def test_all_jobs_are_cancelled_at_once(
    server: Server, client: DistillClient, capsys: Capture
) -> None:
    """Queued ones first, and those that stop after a last checkpoint."""
    running = client.submit(job_config("hang_at=3 hangs=1", max_steps=10_000))
    eventually(lambda: running.refresh().step >= 2)
    waiting = [client.submit(job_config(f"waiting-{n}")) for n in range(2)]
    assert main(["--server", server.address, "cancel", "--all"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert ids == [*(job.id for job in waiting), running.id]
    assert running.refresh().state is JobState.CANCELLING
    assert main(["--server", server.address, "cancel", "--all"]) == 0
    assert capsys.readouterr().err == "no jobs\n"
    assert main(["--server", server.address, "cancel", "--all", "--now"]) == 0
    assert capsys.readouterr().out.split()[0] == running.id


def test_a_token_without_the_role_is_refused_once(
    make_server: Callable[..., Server], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(slots=3, tokens=f"read {'r' * 43}\nsubmit {'s' * 43}\n")
    monkeypatch.setenv("DISTILL_TOKEN", "s" * 43)
    with DistillClient(server.address) as client:
        for job in [client.submit(job_config(max_steps=2)) for _ in range(3)]:
            assert job.wait(60).state is JobState.SUCCEEDED
    monkeypatch.setenv("DISTILL_TOKEN", "r" * 43)
    arguments = ["--server", server.address, "rm", "--all", "--yes"]
    assert main(arguments) == ExitCode.REFUSED
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert "0 of 3 jobs changed, 2 not tried" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm"], "JOB: missing; give jobs, or --all"),
        (["rm", "x", "--all"], "JOB: cannot be combined with options"),
        (["rm", "--state", "RUNNING"], "--state: got RUNNING, expected one of CANCELLED, FAILED"),
        (["resume", "--state", "SUCCEEDED"], "--state: got SUCCEEDED, expected one of"),
        (["cancel", "--older-than", "month"], "--older-than: 'month' is not a time"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["--server", "localhost:1", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_server_that_was_killed_deletes_the_files_at_its_next_start(
    server: Server, client: DistillClient
) -> None:
    job = client.submit(job_config(max_steps=2))
    assert job.wait(60).state is JobState.SUCCEEDED
    server.kill()
    # As a server that is killed between the removal and the deletion.
    with open_database(server.runs / "server.sqlite") as connection:
        store = JobStore(connection, lambda job_id: None)
        Removals(connection, store, server.runs, RunFiles(), lambda job_id: None).remove(job.id)
    assert (server.runs / job.id).exists()
    server.start()
    eventually(lambda: not (server.runs / job.id).exists())
