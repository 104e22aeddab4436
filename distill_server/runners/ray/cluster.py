"""Talks to a Ray cluster in a thread of its own, so that nobody waits for the network."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

from distill_server.runners.ray.jobs import Answer
from protos.errors import DistillError, Unavailable

log = logging.getLogger(__name__)

# Between two looks at every job that somebody asks about.
_PAUSE_SECONDS = 0.5


class Jobs(Protocol):
    """What is asked of a cluster: `RayJobs`."""

    def submit(self, name: str, entrypoint: str) -> None: ...
    def stop(self, name: str) -> None: ...
    def look(self, name: str) -> Answer: ...
    def is_open(self) -> bool: ...


@dataclass
class _Followed:
    entrypoint: str | None = None  # until the cluster has it
    stopping: bool = False
    answer: Answer | None = None
    trouble: str = ""


class RayCluster:
    """The jobs somebody asks about, as the cluster last told. No method waits."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        self._wanted = threading.Event()
        self._greeted = self._out_of_reach = False
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def submit(self, name: str, entrypoint: str) -> None:
        """Start a job as soon as the cluster can be reached."""
        with self._lock:
            self._followed[name] = _Followed(entrypoint)
        self._wanted.set()

    def stop(self, name: str) -> None:
        """Stop a job, or do not start it."""
        with self._lock:
            followed = self._followed.setdefault(name, _Followed())
            followed.stopping, followed.entrypoint = True, None

    def look(self, name: str) -> tuple[Answer | None, str]:
        """The newest answer, None before the first; and what is wrong with the cluster, if any."""
        with self._lock:
            followed = self._followed.setdefault(name, _Followed())
            return followed.answer, followed.trouble

    def forget(self, name: str) -> None:
        """Nobody will ask about it any more."""
        with self._lock:
            self._followed.pop(name, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                followed = list(self._followed.items())
            asks = bool(followed) or not self._greeted
            try:
                self._greet()
                for name, one in followed:
                    self._converse(name, one)
                if asks:
                    self._tell(followed, "")
            except DistillError as error:  # it is away, or refuses everything
                self._tell(followed, error.message)
            except Exception:
                log.exception("cannot talk to the Ray cluster")
            self._wanted.wait(_PAUSE_SECONDS)
            self._wanted.clear()

    def _converse(self, name: str, one: _Followed) -> None:
        """Bring one job's wishes to the cluster, and its answer back."""
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

    def _greet(self) -> None:
        """Once, as soon as there is an answer."""
        if self._greeted:
            return
        if self._jobs.is_open():
            log.warning(
                "whoever reaches the Ray cluster can run any program on it: it asks for no token;"
                " start it with RAY_AUTH_MODE=token, or keep it behind a firewall"
            )
        self._greeted = True

    def _tell(self, followed: list[tuple[str, _Followed]], trouble: str) -> None:
        """To those who ask about a job, and to the log when it changes."""
        for _, one in followed:
            one.trouble = trouble or one.trouble
        if trouble and not self._out_of_reach:
            log.warning("%s: running jobs are left alone, new ones wait", trouble)
        elif self._out_of_reach and not trouble:
            log.warning("the Ray cluster can be reached again")
        self._out_of_reach = bool(trouble)
