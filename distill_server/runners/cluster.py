"""Calls a cluster from a background thread, so that the server never waits for the network."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from protos.errors import DistillError, Unavailable

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_CovariantAnswer = TypeVar("_CovariantAnswer", covariant=True)


class Jobs(Protocol[_CovariantAnswer]):
    """The interface of a Cluster to its cluster. The calls may block.

    The calls raise Unavailable if the cluster does not answer, and another DistillError if the
    cluster refuses the call.
    """

    def submit(self, name: str, entrypoint: str) -> None:
        """Start a job; no effect if the cluster already knows the name."""

    def stop(self, name: str) -> None:
        """Stop a job; no effect if the cluster does not know the job, or if the job has ended."""

    def get_state(self, name: str) -> _CovariantAnswer:
        """Return the state of a job."""


@dataclass
class _FollowedJob(Generic[_Answer]):
    """A job of the cluster, its requests that were not sent yet, and its last known state."""

    entrypoint: str | None = None  # None once the cluster has accepted the job
    is_stopping: bool = False
    answer: _Answer | None = None
    trouble: str = ""


class Cluster(Generic[_Answer]):
    """Follows jobs of a cluster and returns their last known states. Thread-safe; never blocks.

    A daemon thread submits, stops and polls the jobs every `pause_seconds`. `title` is the
    cluster's name in messages.
    """

    def __init__(self, jobs: Jobs[_Answer], title: str, pause_seconds: float) -> None:
        self._jobs = jobs
        self._title = title
        self._pause_seconds = pause_seconds
        self._lock = threading.Lock()
        self._followed_jobs: dict[str, _FollowedJob[_Answer]] = {}
        self._has_new_job = threading.Event()
        self._is_greeted = self._is_unreachable = False
        threading.Thread(target=self._run, name="cluster", daemon=True).start()

    def submit(self, name: str, entrypoint: str) -> None:
        """Follow a job. The thread starts the job as soon as the cluster answers."""
        with self._lock:
            self._followed_jobs[name] = _FollowedJob(entrypoint)
        self._has_new_job.set()

    def stop(self, name: str) -> None:
        """Request the stop of a job. If the job was not submitted yet, it is never started."""
        with self._lock:
            job = self._followed_jobs.setdefault(name, _FollowedJob())
            job.is_stopping, job.entrypoint = True, None

    def get_state(self, name: str) -> tuple[_Answer | None, str]:
        """Return a job's last state and the current problem of the cluster; follow the job.

        The state is None before the first answer of the cluster. The problem is "" if there is
        none.
        """
        with self._lock:
            job = self._followed_jobs.setdefault(name, _FollowedJob())
            return job.answer, job.trouble

    def forget(self, name: str) -> None:
        """Stop following a job."""
        with self._lock:
            self._followed_jobs.pop(name, None)

    def on_first_answer(self) -> None:
        """Called once, at the first answer of the cluster."""

    def _run(self) -> None:
        while True:
            with self._lock:
                followed_jobs = list(self._followed_jobs.items())
            is_polling = bool(followed_jobs) or not self._is_greeted
            try:
                if not self._is_greeted:
                    self.on_first_answer()
                    self._is_greeted = True
                for name, job in followed_jobs:
                    self._update_job(name, job)
                if is_polling:
                    self._record_trouble(followed_jobs, "")
            except DistillError as error:  # the cluster is unreachable, or refuses all calls
                self._record_trouble(followed_jobs, error.message)
            except Exception:
                log.exception("cannot talk to %s", self._title)
            self._has_new_job.wait(self._pause_seconds)
            self._has_new_job.clear()

    def _update_job(self, name: str, job: _FollowedJob[_Answer]) -> None:
        """Submit or stop one job if requested, and fetch its state."""
        try:
            if entrypoint := job.entrypoint:
                self._jobs.submit(name, entrypoint)
                with self._lock:
                    job.entrypoint = None
            if job.is_stopping:
                self._jobs.stop(name)
            job.answer = self._jobs.get_state(name)
            job.trouble = ""
        except Unavailable:
            raise
        except DistillError as error:
            job.trouble = error.message

    def _record_trouble(
        self, followed_jobs: list[tuple[str, _FollowedJob[_Answer]]], trouble: str
    ) -> None:
        """Set the cluster's problem for each job, and log the begin and the end of a problem."""
        for _, job in followed_jobs:
            job.trouble = trouble or job.trouble
        if trouble and not self._is_unreachable:
            log.warning("%s; running jobs continue and new jobs wait", trouble)
        elif self._is_unreachable and not trouble:
            log.warning("%s can be reached again", self._title)
        self._is_unreachable = bool(trouble)
