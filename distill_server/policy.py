"""The limits and times of a server's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from distill_server.runners.machine import ONE_JOB, Machine


@dataclass(frozen=True)
class Policy:
    """Limits and times of the scheduler. Times are in seconds.

    `retries` is the number of automatic retries of a job whose trainer died, since the job last
    made a new step. `backoff` is the pause before the first retry; it doubles with each further
    retry, up to `longest_backoff`. `wait` is the pause before the preflight of a job that waits for
    a teacher is repeated; it doubles up to `longest_wait`. A job that makes no new step for
    `give_up_after`, through no fault of its own, is FAILED. `linger` is the time from the end of
    the last job of a teacher to the teacher's end.
    `cancel_grace` is the time from a cancel to the kill of the trainer, which writes a checkpoint
    meanwhile; `cancel_now_grace` is the time without a checkpoint. `poll_every` is the pause
    between two polls.
    """

    machine: Machine = ONE_JOB
    max_queued: int = 10_000
    retries: int = 3
    backoff: float = 10.0
    longest_backoff: float = 360.0
    cancel_grace: float = 60.0
    cancel_now_grace: float = 5.0
    poll_every: float = 0.2
    wait: float = 5.0
    longest_wait: float = 30.0
    give_up_after: float = 24 * 3600.0
    linger: float = 60.0
