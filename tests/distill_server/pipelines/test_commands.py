"""A file of several jobs at a real server; `distill cancel` and `resume` of several jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from tests.distill_server.conftest import Server, eventually

FILE = """\
[[job]]
name = "warm{words}"
student.model = "tiny"
data.path = "prompts.jsonl"
max_steps = 3

[[job]]
name = "student"
student.model = "@warm{words}/export"
data.path = "prompts.jsonl"
max_steps = 3
"""


def run(server: Server, *arguments: str) -> int:
    return main(["--server", server.address, "--json", *arguments])


def test_a_pipeline_runs_in_order(
    server: Server, client: DistillClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(FILE.format(words=""))
    assert run(server, "submit", str(path), "--dry-run") == 0
    assert not client.list()
    capsys.readouterr()
    assert run(server, "submit", str(path), "--key", "k", "-f") == 0
    jobs = json.loads(capsys.readouterr().out.splitlines()[0])["jobs"]
    warm, student = (client.get(job["id"]) for job in jobs)
    assert warm.state is student.state is JobState.SUCCEEDED
    assert warm.ended_at <= student.started_at
    run_directory = RunDirectory(server.runs / student.id)
    config = run_directory.config()
    assert config.student is not None
    assert config.student.model == str(server.runs / warm.id / "export")
    assert (run_directory.path / "job.toml").read_text() == path.read_text()
    assert run(server, "submit", str(path), "--key", "k") == 0
    repeated_jobs = json.loads(capsys.readouterr().out.splitlines()[-1])["jobs"]
    assert [job["id"] for job in repeated_jobs] == [warm.id, student.id]
    assert [job["dependencies"] for job in repeated_jobs] == [[], [warm.id]]
    assert main(["--server", server.address, "tree", student.id]) == 0
    _, first_row, second_row = capsys.readouterr().out.splitlines()
    assert first_row.split()[:3] == [warm.id, "SUCCEEDED", "3/3"]
    assert second_row.split()[:4] == ["`-", student.id, "SUCCEEDED", "3/3"]
    assert run(server, "tree") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][1]["dependencies"] == [warm.id]


def test_several_are_cancelled_and_resumed(
    server: Server, client: DistillClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(FILE.format(words=" pause=1"))
    assert run(server, "submit", str(path)) == 0
    ids = [job["id"] for job in json.loads(capsys.readouterr().out)["jobs"]]
    eventually(lambda: client.get(ids[1]).phase)
    assert main(["--server", server.address, "ls"]) == 0
    assert f"WAITING for {ids[0]}" in capsys.readouterr().out
    assert run(server, "cancel", "--now", *ids[::-1]) == 0
    assert [job["id"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ids[::-1]
    assert {client.wait(job_id, timeout=60).state for job_id in ids} == {JobState.CANCELLED}
    assert run(server, "resume", *ids[::-1]) == 6, "the first is to be resumed first"
    assert "resume that job first" in capsys.readouterr().err
    assert run(server, "resume", *ids) == 0
    assert [client.wait(job_id, timeout=60).state for job_id in ids] == [JobState.SUCCEEDED] * 2
