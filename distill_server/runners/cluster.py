"""Calls a cluster from a background thread, so that the server never waits for the network."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from protos.errors import DistillError, Unavailable

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_SaidAnswer = TypeVar("_SaidAnswer", covariant=True)


class Jobs(Protocol[_SaidAnswer]):
    """The calls that a Cluster makes; calls may block.

    They raise Unavailable if the cluster does not answer, and another DistillError if it refuses
    the call.
    """

    def submit(self, name: str, entrypoint: str) -> None:
        """Start a job; no effect if the cluster already knows the name."""

    def stop(self, name: str) -> None:
        """Stop a job; no effect if the cluster does not know it, or if it has ended."""

    def look(self, name: str) -> _SaidAnswer:
        """Return the state of a job."""


@dataclass
class _Followed(Generic[_Answer]):
    entrypoint: str | None = None  # None once the cluster has accepted the job
    stopping: bool = False
    answer: _Answer | None = None
    trouble: str = ""


class Cluster(Generic[_Answer]):
    """The last known state of the followed jobs of a cluster. No method blocks; thread-safe.

    A daemon thread submits, stops and polls the jobs every `pause_seconds`. `title` is the cluster
    in messages.
    """

    def __init__(self, jobs: Jobs[_Answer], title: str, pause_seconds: float) -> None:
        self._jobs = jobs
        self._title = title
        self._pause_seconds = pause_seconds
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed[_Answer]] = {}
        self._wanted = threading.Event()
        self._greeted = self._out_of_reach = False
        threading.Thread(target=self._run, name="cluster", daemon=True).start()

    def submit(self, name: str, entrypoint: str) -> None:
        """Follow a job, and start it as soon as the cluster can be reached."""
        with self._lock:
            self._followed[name] = _Followed(entrypoint)
        self._wanted.set()

    def stop(self, name: str) -> None:
        """Stop a job; a job that was not yet submitted is not started."""
        with self._lock:
            followed = self._followed.setdefault(name, _Followed())
            followed.stopping, followed.entrypoint = True, None

    def look(self, name: str) -> tuple[_Answer | None, str]:
        """Return a job's last state and the current problem of the cluster; starts following it.

        The state is None before the first answer; the problem is "" if there is none.
        """
        with self._lock:
            followed = self._followed.setdefault(name, _Followed())
            return followed.answer, followed.trouble

    def forget(self, name: str) -> None:
        """Stop following a job."""
        with self._lock:
            self._followed.pop(name, None)

    def greet(self) -> None:
        """Called once, at the first answer of the cluster."""

    def _run(self) -> None:
        while True:
            with self._lock:
                followed = list(self._followed.items())
            asks = bool(followed) or not self._greeted
            try:
                if not self._greeted:
                    self.greet()
                    self._greeted = True
                for name, one in followed:
                    self._converse(name, one)
                if asks:
                    self._tell(followed, "")
            except DistillError as error:  # the cluster is unreachable, or refuses all calls
                self._tell(followed, error.message)
            except Exception:
                log.exception("cannot talk to %s", self._title)
            self._wanted.wait(self._pause_seconds)
            self._wanted.clear()

    def _converse(self, name: str, one: _Followed[_Answer]) -> None:
        """Submit or stop one job if requested, and fetch its state."""
        try:
            if entrypoint := one.entrypoint:
                self._jobs.submit(name, entrypoint)
                with self._lock:
                    one.entrypoint = None
            if one.stopping:
                self._jobs.stop(name)
            one.answer = self._jobs.look(name)
            one.trouble = ""
        except Unavailable:
            raise
        except DistillError as error:
            one.trouble = error.message

    def _tell(self, followed: list[tuple[str, _Followed[_Answer]]], trouble: str) -> None:
        """Record the cluster's problem for each job, and log it when it begins or ends."""
        for _, one in followed:
            one.trouble = trouble or one.trouble
        if trouble and not self._out_of_reach:
            log.warning("%s; running jobs continue and new jobs wait", trouble)
        elif self._out_of_reach and not trouble:
            log.warning("%s can be reached again", self._title)
        self._out_of_reach = bool(trouble)
