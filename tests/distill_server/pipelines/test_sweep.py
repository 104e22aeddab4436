"""A sweep at a real server: one job for each combination, and a table of their results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from tests.distill_server.conftest import Server

# The scripted trainer evaluates at every fifth step before the last: eval/kl is |step - best|.
FILE = """\
name = "best=12 points"
student.model = "tiny"
data.path = "prompts.jsonl"
[sweep]
max_steps = [12, 22]
seed = [1, 2]
"""


def run(server: Server, *arguments: str) -> int:
    return main(["--server", server.address, *arguments])


def test_points_run_and_are_compared(
    server: Server, client: DistillClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(FILE)
    assert run(server, "submit", str(path), "--key", "k") == 0
    output = capsys.readouterr()
    ids = [line.split()[0] for line in output.out.splitlines()]
    note, command = output.err.splitlines()
    assert note == f"data.path: prompts.jsonl is not in {Path.cwd()}: taken as a path of the server"
    assert command.strip().startswith("distill table --label 'sweep=best=12 points'")
    assert {client.wait(job_id, timeout=60).state for job_id in ids} == {JobState.SUCCEEDED}
    jobs = [client.get(job_id) for job_id in ids]
    assert [(job.max_steps, json.loads(job.config_json)["seed"]) for job in jobs] == [
        (12, 1),
        (12, 2),
        (22, 1),
        (22, 2),
    ]
    table_command = ("table", "--label", "sweep=best=12 points")
    assert run(server, "--json", *table_command) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["metric"] == "eval/kl"
    assert [(job["id"], job["last"]["step"], job["last"]["value"]) for job in table["jobs"]] == [
        (ids[0], 10, 2.0),
        (ids[1], 10, 2.0),
        (ids[2], 20, 8.0),
        (ids[3], 20, 8.0),
    ]
    assert {(job["best"]["step"], job["best"]["value"]) for job in table["jobs"]} == {(10, 2.0)}
    assert run(server, *table_command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["ID", "MAX_STEPS", "SEED", "STATE", "STEPS", "EVAL/KL", "BEST"]
    assert lines[3] == [ids[2], "22", "1", "SUCCEEDED", "22/22", "8", "@20", "2", "@10", "*"]
    assert run(server, "table", *ids[:1], "-m", "loss") == 0
    assert capsys.readouterr().out.split()[-4:] == ["12/12", "0.08333", "@12", "-"]
    assert run(server, "table", *ids[:1], "-m", "los") == 2
    assert "no job has the metric 'los'; did you mean 'loss'?" in capsys.readouterr().err
    assert run(server, "submit", str(path), "--key", "k") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ids


def test_none_is_queued_if_the_server_refuses_one(
    server: Server, client: DistillClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(FILE.replace("seed = [1, 2]", "resources.cpus = [1, 4000]"))
    assert run(server, "submit", str(path)) == 2
    assert "job 'best=12 points-max_steps=12-cpus=4000': " in capsys.readouterr().err
    assert not client.list()
    assert run(server, "table", "--all") == 0
    assert capsys.readouterr().err == "no jobs\n"
