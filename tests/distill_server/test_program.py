"""`python -m distill_server` itself."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from clients.jobs.client import DistillClient
from protos.errors import NotFound
from tests.scraping import metrics_address, scrape, status


def command(runs: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "distill_server", "--runs", str(runs), *options]


@contextmanager
def program(
    runs: Path, *options: str, stderr: IO[bytes] | None = None, tokens: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the program; yield it once it is ready, and its first line of output."""
    with subprocess.Popen(
        command(runs, "--port", "0", *options),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "DISTILL_TOKENS": tokens},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_starts_serves_and_stops(tmp_path: Path) -> None:
    with program(tmp_path / "runs") as (process, line):
        assert line.startswith("server listening on 127.0.0.1:")
        with DistillClient(line.split()[-1]) as client:
            with pytest.raises(NotFound, match="there are no jobs yet"):
                client.get("@last")
            assert client.list() == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert (tmp_path / "runs" / "server.sqlite").exists()


def test_its_page_is_always_there(tmp_path: Path) -> None:
    """The metrics page is at a free port, which the log names, and needs no token."""
    log = tmp_path / "server.log"
    with (
        log.open("wb") as stderr,
        program(tmp_path / "runs", stderr=stderr, tokens="read " + 43 * "a") as (process, line),
    ):
        assert line.startswith("server listening on")
        page = metrics_address(log)
        assert (status(page, "/healthz"), status(page, "/readyz")) == (200, 200)
        assert scrape(page)["distill_server_jobs[QUEUED]"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_jobs_of_a_cluster_outlive_the_server(tmp_path: Path) -> None:
    options = ("--on-stop=checkpoint", "--ray", "http://127.0.0.1:1")
    process = subprocess.run(
        command(tmp_path / "runs", *options), capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert process.stderr == (
        "error: --on-stop: the jobs of a cluster continue without the server; remove the option\n"
    )


def test_the_database_may_be_elsewhere(tmp_path: Path) -> None:
    """--database puts the database on a local disk, where the runs are on a file server."""
    with program(tmp_path / "runs", "--database", str(tmp_path / "here.sqlite")) as (_, line):
        assert line.startswith("server listening on")
        # Another database does not get the uploads and teachers of this one's jobs.
        other_server = [*command(tmp_path / "runs"), "--database", str(tmp_path / "other.sqlite")]
        refusal = subprocess.run(other_server, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "here.sqlite").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {".server.json", ".server.lock"}
    assert refusal.returncode == 2
    assert "error: another server uses" in refusal.stderr


def test_one_server_per_directory(tmp_path: Path) -> None:
    with program(tmp_path):
        second_server = run(command(tmp_path, "--port", "0"))
    assert second_server.returncode == 2
    assert second_server.stdout == ""
    assert second_server.stderr == (
        f"error: another server uses {tmp_path}; stop that server, or start this server with"
        f" another --runs directory\n"
    )


def test_taken_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        process = run(command(tmp_path, "--port", port))
    assert (process.returncode, process.stdout) == (2, "")
    name, user = Path("/proc/self/comm").read_text().strip(), getpass.getuser()
    assert process.stderr.splitlines()[-1] == (
        f"error: --port: port {port} is taken by {name} (process {os.getpid()} of {user}, in"
        f" {Path.cwd()}); choose another port, or 0 for any free port, and give clients the new"
        " address"
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--host", "0.0.0.0"], "refusing to listen"), (["--slots", "0"], "--slots")],
)
def test_bad_options(tmp_path: Path, options: list[str], word: str) -> None:
    process = run(command(tmp_path / "runs", "--port", "0", *options))
    assert process.returncode == 2
    assert word in process.stderr
    assert "Traceback" not in process.stderr


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for runs in (tmp_path / "file", tmp_path / "file" / "runs"):
        process = run(command(runs, "--port", "0"))
        assert process.returncode == 2
        assert process.stderr.startswith(f"error: --runs: cannot create the directory {runs}: ")
        assert len(process.stderr.splitlines()) == 1


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
