"""A child process that scores one answer at a time. It is killed if an answer takes too long.

Scoring runs code that may hang or crash: a user's function, a regular expression with catastrophic
backtracking, or algebra on a text of the model. In a separate process, such code does not affect
the trainer. Trainer and child process exchange JSON lines over a socket, so a text that the code
prints does not disturb them. Each reply has the number of its request. Does not import torch.
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

from clients.config.tables.reward import RewardConfig
from protos.errors import InvalidInput
from student_trainer.rewards.sample import RewardSample

SECONDS_TO_START = 120.0  # a user's file may import anything


class ScoringFailed(Exception):
    """An answer could not be scored.

    The message gives the reason as a clause without a full stop.
    """


class Judge:
    """A child process that scores answers.

    The process starts with the first request. If it was killed, the next request starts it again.
    Not thread-safe: only one request may run at a time.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Store the configuration. Starts no process."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._number = 0  # the number of the newest request
        self._received = b""  # after the newest reply

    def start(self) -> None:
        """Start the child process, and wait until it is ready, at most SECONDS_TO_START.

        Raises InvalidInput if the reward cannot be loaded: a package is not installed,
        `reward.task` or its options are not valid, the user's file fails, or loading takes too
        long.
        """
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            descriptor = str(child_socket.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "student_trainer.rewards", descriptor],
                stdin=subprocess.DEVNULL,
                stdout=2,  # printed text goes to stderr: stdout of this process may be a result
                pass_fds=[child_socket.fileno()],
                start_new_session=True,  # so that `close` can also kill the processes it starts
            )
        self._socket, self._received = parent_socket, b""
        try:
            startup_reply = self._exchange(
                {"config": self._config.model_dump_json()}, SECONDS_TO_START
            )
        except ScoringFailed as error:
            raise InvalidInput(
                f"the reward cannot be loaded: {error}",
                field="reward",
                hint="check the code that the reward imports",
            ) from error
        if "fault" in startup_reply:
            self.close()
            raise InvalidInput(
                startup_reply["fault"], field=startup_reply["field"], hint=startup_reply["hint"]
            )

    def score(self, sample: RewardSample) -> float:
        """Return the reward of an answer.

        Raises ScoringFailed if the reward raises an error, is not finite, or takes longer than
        `reward.timeout_seconds`. The next request works again.
        """
        return float(self._request("score", sample))

    def vote(self, sample: RewardSample) -> str:
        """Return the vote of an answer for a majority vote.

        Raises ScoringFailed as `score` does.
        """
        return str(self._request("vote", sample))

    def close(self) -> None:
        """Kill the process and all processes that it has started.

        The next request starts a new process.
        """
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _request(self, method: Literal["score", "vote"], sample: RewardSample) -> Any:
        if self._process is None:
            try:
                self.start()
            except (InvalidInput, OSError) as error:
                raise ScoringFailed(f"the process of the reward did not start: {error}") from error
        message = {"what": method, "sample": asdict(sample)}
        reply = self._exchange(message, self._config.timeout_seconds)
        if "error" in reply:
            raise ScoringFailed(reply["error"])
        return reply["value"]

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._number += 1
        line = json.dumps({"number": self._number, **message}, default=str) + "\n"
        deadline = time.monotonic() + seconds
        try:
            assert self._socket is not None
            self._socket.settimeout(_remaining_seconds(deadline))
            self._socket.sendall(line.encode())
            while True:
                reply: dict[str, Any] = json.loads(self._receive_line(deadline))
                # A process that the user's code has forked may reply to an earlier request again.
                if reply["number"] == self._number:
                    return reply
        except TimeoutError:
            self.close()
            raise ScoringFailed(f"the reward took more than {seconds:g} s") from None
        except OSError as error:
            self.close()
            raise ScoringFailed(f"the process of the reward ended ({error})") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            raise ScoringFailed("the reward wrote to the connection of its process") from None

    def _receive_line(self, deadline: float) -> bytes:
        assert self._socket is not None
        while b"\n" not in self._received:
            self._socket.settimeout(_remaining_seconds(deadline))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise ConnectionError("the process closed the connection")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


def _remaining_seconds(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
