"""A child process that judges answers, one at a time, and is killed when one takes too long.

Judging runs code that nobody can vouch for: a user's function, a pattern that backtracks for ever,
algebra on whatever a model wrote. In a process of its own it can neither hang the trainer nor take
it down. They speak JSON lines over a socket, so that what is printed is in nobody's way.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from clients.config.reward import RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards.sample import RewardSample

SECONDS_TO_START = 120.0  # a user's file may import anything


class Unjudged(Exception):
    """An answer got no reward; the message says why."""


class Judge:
    """Owns the process, which begins with the first need of it, and again after each kill."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Raises InvalidInput where the reward cannot be made."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "student_trainer.rewards", number],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what is printed is talk: our own output may be a result
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that its children are killed with it
            )
        self._socket = ours
        try:
            first = self._exchange({"config": self._config.model_dump_json()}, SECONDS_TO_START)
        except Unjudged as error:
            raise InvalidInput(f"cannot be loaded: its process {error}", field="reward") from error
        if "fault" in first:
            self.close()
            raise InvalidInput(first["fault"], field=first["field"], hint=first["hint"])

    def score(self, sample: RewardSample) -> float:
        """What it is worth. Raises Unjudged, after which another answer may be given."""
        return float(self._asked("score", sample))

    def said(self, sample: RewardSample) -> str:
        """What of it is its vote. Raises Unjudged likewise."""
        return str(self._asked("said", sample))

    def close(self) -> None:
        """End the process and what it started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _asked(self, what: Literal["score", "said"], sample: RewardSample) -> Any:
        if self._process is None:
            try:
                self.start()
            except (InvalidInput, OSError) as error:
                raise Unjudged(f"has no judge: {error}") from error
        message = {"what": what, "sample": asdict(sample)}
        reply = self._exchange(message, self._config.timeout_seconds)
        if "error" in reply:
            raise Unjudged(reply["error"])
        return reply["found"]

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            assert self._socket is not None
            line = json.dumps(message, default=str) + "\n"
            return _reply(self._socket, line.encode(), time.monotonic() + seconds)
        except TimeoutError:
            self.close()
            raise Unjudged(f"took more than {seconds:g} s") from None
        except OSError as error:
            self.close()
            raise Unjudged(f"died ({error})") from None


def _reply(channel: socket.socket, line: bytes, deadline: float) -> dict[str, Any]:
    channel.settimeout(_left(deadline))
    channel.sendall(line)
    received = b""
    while not received.endswith(b"\n"):
        channel.settimeout(_left(deadline))
        part = channel.recv(65536)
        if not part:
            raise ConnectionError("it closed its end")
        received += part
    reply: dict[str, Any] = json.loads(received)
    return reply


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
