"""The example scripts, run unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from tests.distill_server.conftest import Server
from tests.documents import blocks

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.py"
JOB = """\
name = "pause=0.02 every=5"
max_steps = 60
student.model = "tiny"
data.path = "prompts.jsonl"
"""


def test_quickstart(server: Server, client: DistillClient, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    process = subprocess.run(
        [sys.executable, str(QUICKSTART), "job.toml", server.address],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert process.returncode == 0, process.stderr
    (job,) = client.list()
    assert (job.state, job.attempt, job.step) == (JobState.SUCCEEDED, 2, 60)
    lines = process.stdout.splitlines()
    assert lines[0] == "--set: teacher.topk: unknown key; did you mean 'top_k'?"
    assert lines[1] == f"{job.id} QUEUED"
    assert lines[2] == "1 {'loss': 1.0}"
    stopped_line, ended_line, _, path = lines[-4:]
    assert stopped_line.startswith("CANCELLED at step ")
    assert 10 <= int(stopped_line.split()[-1]) < 60
    assert ended_line == "SUCCEEDED at step 60"
    assert (Path(path) / "config.json").is_file()


def test_the_readme_s_client(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.replace("pause=0.02", "best=20"))
    (block,) = blocks("docs/python.md", "client")
    assert block.body.count("localhost:50051") == 1
    exec(block.body.replace("localhost:50051", server.address), {})
    assert capsys.readouterr().out.splitlines()[-1] == "60 None"
    assert (tmp_path / "trained" / "config.json").is_file()
    assert (tmp_path / "best" / "weights.bin").read_bytes() == bytes([20]) * 1000
