"""Captures started by the command and by a server."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from protos.errors import InvalidInput
from tests.documents import blocks
from tests.end_to_end.processes import ENVIRONMENT, MakeServer
from tests.teacher_service.capture.material import (
    capture_here,
    digests,
    job,
    pairs,
    save_words,
    write_pairs,
)

JOB_FILE = "deploy/jobs/gsm8k_capture.toml"
JOB = """
data.path = "data.jsonl"
data.tokenizer = "words"
teacher = { model = "vocab=64", engine = "fake", top_k = 4, max_batch_tokens = 128 }
method = { shard_bytes = 2000, max_tokens = 64 }
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_words(tmp_path / "words")
    write_pairs(tmp_path / "data.jsonl", pairs(100))
    (tmp_path / JOB_FILE).parent.mkdir(parents=True)
    (tmp_path / JOB_FILE).write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_distill(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_the_commands(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the commands of docs/capture.md with another data set and teacher."""
    (block,) = blocks("docs/capture.md", "capture")
    capture, *other_commands = (shlex.split(command)[1:] for command in block.commands)
    process = run_distill(*capture)
    assert process.returncode == 0, process.stderr
    for arguments in other_commands:
        assert main(arguments) == 0
    assert process.stdout.split()[1:4] == ["SUCCEEDED", "100/100", "steps"]
    assert process.stdout.split()[-2:] == ["store", str(directory / "rows" / "gsm8k")]
    _, undisturbed = capture_here(
        directory / "run", job(directory / "data.jsonl", directory / "words")
    )
    assert digests(directory / "rows" / "gsm8k") == digests(undisturbed)
    (run,) = Path("runs").glob("capture-distill-*")
    last_line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last_line["step"] == 100
    assert {"tokens", "tokens_per_sec", "bytes"} <= last_line.keys()

    refused_process = run_distill(
        "capture", JOB_FILE, "--store", "rows/gsm8k", "--set", "teacher.top_k=5"
    )
    assert refused_process.returncode != 0
    assert "holds rows with top_k = 4, not 5; use another directory" in refused_process.stderr

    capsys.readouterr()
    assert main(["--json", "store", "info", "rows/gsm8k"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["sequences"], info["top_k"], info["complete"]) == (100, "4", True)
    options = ["--sequence", "-1", "--rows", "2", "--head", "1"]
    assert main(["store", "sample", "rows/gsm8k", *options]) == 0
    first_line, prompt_line, scored_line, *rows = capsys.readouterr().out.splitlines()
    prompt_ids, answer_ids = pairs(100)[-1]
    assert (
        first_line
        == f"sequence -1: {len(prompt_ids + answer_ids) + 1} tokens, scored from {len(prompt_ids)}"
    )
    assert prompt_line.split() == ["prompt", *(f"t{i}" for i in prompt_ids)]
    assert scored_line.split() == ["scored", *(f"t{i}" for i in answer_ids), "t0"]
    assert [row.split()[:2] for row in rows] == [
        [str(len(prompt_ids) + i), f"'t{token}'"] for i, token in enumerate([*answer_ids, 0][:2])
    ]
    assert main(["store", "verify", "rows/gsm8k"]) == 0
    assert capsys.readouterr().out == "rows/gsm8k: no damage\n"
    Path("rows/gsm8k/00000001.arrow").unlink()
    assert main(["--json", "store", "verify", "rows/gsm8k"]) == 1
    assert json.loads(capsys.readouterr().out)["damages"][0].startswith("shard 00000001.arrow: ")

    process = run_distill("capture", JOB_FILE, "--store", "half", "--shard", "1/2")
    assert process.returncode == 0, process.stderr
    manifest = Path("half/shard-1-of-2/manifest.json")
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(document | {"shards": document["shards"][:-1]}))
    assert main(["store", "verify", str(manifest.parent)]) == 1
    shard_line, missing_line = capsys.readouterr().out.splitlines()
    assert shard_line.endswith(": no damage")
    assert missing_line.startswith("incomplete: ")
    assert main(["run", "--resume", str(run), "--set", "max_steps=200"]) == 2
    assert "a job of method capture has no max_steps" in capsys.readouterr().err


def test_submitted(directory: Path, make_server: MakeServer) -> None:
    """The pulled store has the bytes of a local capture; progress is counted in sequences."""
    _, undisturbed = capture_here(
        directory / "run", job(directory / "data.jsonl", directory / "words")
    )
    server = make_server()
    with DistillClient(server.address) as client:
        with pytest.raises(InvalidInput, match="stores the rows in the run directory"):
            client.submit(
                job(directory / "data.jsonl", directory / "words", method__store="/tmp/rows")
            )
        slow_job = job(
            directory / "data.jsonl", directory / "words", teacher__model="vocab=64,latency_ms=20"
        )
        submitted = client.submit(slow_job)
        assert submitted.id.startswith("capture-distill-")
        events = list(client.watch(submitted.id))
        ended_job = client.get(submitted.id)
        assert (ended_job.state, ended_job.step, ended_job.max_steps) == (
            JobState.SUCCEEDED,
            100,
            100,
        )
        metrics_events = [event for event in events if event.metrics]
        assert metrics_events
        assert {event.max_steps for event in metrics_events} == {100}
        assert metrics_events[-1].step == 100
        pulled_path = client.pull(submitted.id, directory / "pulled")
    assert digests(pulled_path) == digests(undisturbed)
