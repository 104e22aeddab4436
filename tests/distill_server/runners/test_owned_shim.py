"""Shims that end with their owner or with their attempt, and waiting for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE, raise_fence
from distill_server.runners.local import shim_files
from distill_server.runners.local.process import family, kill_family, send_signal, write_json
from distill_server.runners.local.shim_files import (
    LivingShims,
    attempts_before,
    card_of,
    exit_code_of,
)
from tests.distill_server.conftest import eventually


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


class Clock:
    """A clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_earlier_attempts_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they record their exit or have sent no heartbeat for long."""
    clock = Clock()
    monkeypatch.setattr(shim_files, "time", clock)
    logs = tmp_path / "logs"
    shims = [logs / "attempt-1", logs / "attempt-2" / "rank-0", logs / "attempt-2" / "rank-1"]
    for shim in [*shims, logs / "attempt-10" / "rank-0", logs / "attempt-3" / "rank-0"]:
        shim.mkdir(parents=True)
        write_json(shim / "shim.json", {})
    write_json(shims[0] / "exit.json", {"code": 0})
    earlier_shims = LivingShims(attempts_before(logs / "attempt-3"))
    for beat in range(100):
        for shim in shims[1:]:
            (shim / "heartbeat").touch()
            os.utime(shim / "heartbeat", ns=(beat, beat + 1))
        assert not earlier_shims.are_gone()
    write_json(shims[1] / "exit.json", {"code": 0})
    since = clock.now
    while not earlier_shims.are_gone():
        assert clock.now < since + 20
    assert clock.now >= since + 14
    assert LivingShims(attempts_before(logs / "attempt-1")).are_gone()


class OwnedShim:
    """A shim of one of several processes, and the owner's end of its stdin."""

    def __init__(self, run: RunDirectory, code: str, attempt: int = 1) -> None:
        self.directory = run.logs(attempt) / "rank-0"
        self.directory.mkdir(parents=True)
        log = run.log_file(attempt)
        self.owner_socket, shim_socket = socket.socketpair()
        argv = [sys.executable, "-m", "distill_server.runners.local.shim", str(log), "5"]
        argv += ["--rank", str(self.directory), "--", sys.executable, "-S", "-c", code]
        environment = {**os.environ, VARIABLE: raise_fence(run.path, attempt)}
        with shim_socket:
            subprocess.run(argv, stdin=shim_socket.fileno(), env=environment, check=True)
        eventually(lambda: card_of(self.directory) or self.code is not None)

    @property
    def mark(self) -> str:
        mark = json.loads((self.directory / "shim.json").read_text())["mark"]
        assert isinstance(mark, str)
        return mark

    @property
    def code(self) -> int | None:
        return exit_code_of(self.directory)

    def wait_for_end(self) -> int | None:
        """Wait until the shim closes its stdin, which it does at its end; return the exit code."""
        self.owner_socket.settimeout(60)
        assert self.owner_socket.recv(1) == b""
        return self.code


ORPHAN = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
    "time.sleep(99)"
)


@pytest.fixture
def shim(run: RunDirectory) -> Iterator[Callable[..., OwnedShim]]:
    owned_shims: list[OwnedShim] = []

    def make(code: str, attempt: int = 1) -> OwnedShim:
        owned_shims.append(OwnedShim(run, code, attempt))
        return owned_shims[-1]

    yield make
    for owned_shim in owned_shims:
        owned_shim.owner_socket.close()
        kill_family(owned_shim.mark)


def test_an_owned_shim_tells_its_owner(shim: Callable[..., OwnedShim]) -> None:
    assert shim("raise SystemExit(3)").wait_for_end() == 3


def test_an_owned_shim_ends_with_its_owner(shim: Callable[..., OwnedShim]) -> None:
    owned_shim = shim(ORPHAN)
    eventually(lambda: len(family(owned_shim.mark)) == 2)
    owned_shim.owner_socket.close()
    eventually(lambda: owned_shim.code == -signal.SIGKILL)
    assert family(owned_shim.mark) == []


def test_a_shim_ends_when_another_attempt_begins(
    run: RunDirectory, shim: Callable[..., OwnedShim]
) -> None:
    """The shim reads the fence in the run directory, on whichever node it runs."""
    owned_shim = shim(ORPHAN)
    eventually(lambda: len(family(owned_shim.mark)) == 2)
    raise_fence(run.path, 2)
    assert owned_shim.wait_for_end() == -signal.SIGKILL
    assert family(owned_shim.mark) == []


def test_an_owned_shim_is_stopped_as_any_other(shim: Callable[..., OwnedShim]) -> None:
    owned_shim = shim("import time; time.sleep(99)")
    card = card_of(owned_shim.directory)
    assert card is not None
    assert send_signal(card.shim, signal.SIGTERM)
    assert owned_shim.wait_for_end() == -signal.SIGTERM
