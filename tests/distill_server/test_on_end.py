"""The command of `--on-end`: real commands, run by a real server."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import Job, JobState
from distill_server.on_end import EndCommand
from protos.errors import InvalidInput
from tests.distill_server.conftest import Server, eventually, job_config
from tests.documents import blocks

APPENDS = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def python(code: str, *arguments: object) -> str:
    return " ".join([sys.executable, "-c", f'"{code}"', *map(str, arguments)])


def make_ended_job(job_id: str, state: JobState = JobState.SUCCEEDED) -> Job:
    numbers = {"attempt": 1, "step": 1, "max_steps": 1, "last_seq": 1}
    times = {"created_at": 1.0, "started_at": 1.0, "ended_at": 1.0}
    words = {"name": job_id, "kind": "on_policy", "reason": "", "phase": ""}
    return Job(id=job_id, state=state, config_json='{"secret": 1}', **words, **numbers, **times)  # type: ignore[arg-type]


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_gets_each_end_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "told.jsonl"
    command = EndCommand(python(APPENDS, out))
    command.on_job_change(make_ended_job("early", JobState.RUNNING))
    states = (JobState.FAILED, JobState.CANCELLED, JobState.SUCCEEDED)
    for state in states:
        command.on_job_change(make_ended_job(state.lower(), state))
    eventually(lambda: len(records(out)) == 3)
    assert [record["state"] for record in records(out)] == list(states)
    assert all(
        "secret" not in str(record) and record["kind"] == "on_policy" for record in records(out)
    )


def test_a_command_that_fails_or_hangs_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command still runs for the next job."""
    caplog.set_level(logging.WARNING)
    out = tmp_path / "told.jsonl"
    code = (
        "import sys, json, time; text = sys.stdin.read(); name = json.loads(text)['id'];"
        " name == 'bad' and sys.exit(3); name == 'slow' and time.sleep(600);"
        " open(sys.argv[1], 'a').write(text)"
    )
    command = EndCommand(python(code, out), seconds=5)
    for name in ("bad", "slow", "good"):
        command.on_job_change(make_ended_job(name))
    eventually(lambda: [record["id"] for record in records(out)] == ["good"])
    assert caplog.messages == [
        "--on-end: job bad: exit code 3",
        "--on-end: job slow: killed after 5 s",
    ]


def test_a_server_that_ends_takes_its_command_along(tmp_path: Path) -> None:
    """In a separate process, as a server is: its exit kills the running command."""
    mark = tmp_path / "pid"
    sleeps = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import sys, time, logging; from pathlib import Path\n"
        "from tests.distill_server.test_on_end import make_ended_job, EndCommand\n"
        "logging.basicConfig()\n"
        "command = EndCommand(sys.argv[1])\n"
        "command.on_job_change(make_ended_job('one'))\n"
        "command.on_job_change(make_ended_job('two'))\n"
        "mark = Path(sys.argv[2])\n"
        "while not (mark.exists() and mark.read_text()): time.sleep(0.01)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, python(sleeps, mark), str(mark)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert "not run for job two" in process.stderr
    eventually(lambda: not Path(f"/proc/{mark.read_text()}").exists())


@pytest.mark.parametrize("command", ["", "no-such-program --now", "sh 'unclosed"])
def test_a_command_that_cannot_run(command: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--on-end: cannot run"):
        EndCommand(command)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_command_of_the_document_sends_a_message() -> None:
    (block,) = blocks("docs/operations.md", "on-end")
    program, option, command = shlex.split(block.commands[0])
    assert (program, option) == ("distill-server", "--on-end")
    messages: list[tuple[str | None, dict[str, object]]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            messages.append((self.headers["Content-Type"], json.loads(body)))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server_url = f"http://127.0.0.1:{server.server_address[1]}"
        EndCommand(command.replace("https://chat.example", server_url)).on_job_change(
            make_ended_job("done")
        )
        eventually(lambda: messages)
        server.shutdown()
    [(kind, record)] = messages
    assert (kind, record["id"], record["state"]) == ("application/json", "done", "SUCCEEDED")


def test_a_server_tells_ends_and_waits_for_no_command(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    out, gate = tmp_path / "told.jsonl", tmp_path / "gate"
    code = (
        "import os, sys, time; text = sys.stdin.read(); open(sys.argv[1], 'a').write(text);"
        " [time.sleep(0.01) for _ in iter(lambda: os.path.exists(sys.argv[2]), True)]"
    )
    server = make_server(on_end=python(code, out, gate))
    with DistillClient(server.address) as client:
        first_job = client.submit(job_config(max_steps=1))
        second_job = client.submit(job_config(max_steps=1))
        eventually(lambda: client.get(second_job.id).state is JobState.SUCCEEDED)
        eventually(lambda: len(records(out)) == 1)  # the first command still runs
        gate.touch()
        eventually(lambda: len(records(out)) == 2)
    assert [record["id"] for record in records(out)] == [first_job.id, second_job.id]
