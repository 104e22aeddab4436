"""Jobs that a server has: a job's values, with methods that ask the server about this job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clients.jobs.artifacts import Checkpoint
from clients.jobs.job import Job, JobEvent, JobState
from protos import distill_pb2 as pb

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient


@dataclass(frozen=True)
class JobHandle(Job):
    """A job as the server reported it, with the methods of DistillClient for this job.

    The values do not change; `refresh` and `wait` return a handle with new ones. Each method raises
    what the method of DistillClient with its name raises.
    """

    client: DistillClient = field(repr=False, compare=False, kw_only=True)

    def refresh(self) -> JobHandle:
        """Return the job as it is now; see `DistillClient.get`."""
        return self.client.get(self.id)

    def wait(self, timeout: float | None = None) -> JobHandle:
        """Wait until the job ends, and return it; see `DistillClient.wait`."""
        return self.client.wait(self.id, timeout)

    def watch(self, after_seq: int = 0, *, timeout: float | None = None) -> Iterator[JobEvent]:
        """Yield every event until the job ends; see `DistillClient.watch`."""
        return self.client.watch(self.id, after_seq, timeout=timeout)

    def history(self) -> Sequence[JobEvent]:
        """Return every event up to now; see `DistillClient.history`."""
        return self.client.history(self.id)

    def logs(
        self, *, attempt: int = 0, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[bytes]:
        """Yield the log of an attempt in chunks; see `DistillClient.logs`."""
        return self.client.logs(self.id, attempt=attempt, follow=follow, tail_lines=tail_lines)

    def cancel(self, *, now: bool = False) -> JobHandle:
        """Cancel the job without waiting for its end; see `DistillClient.cancel`."""
        return self.client.cancel(self.id, now=now)

    def resume(self, *, max_steps: int | None = None, from_step: int | None = None) -> JobHandle:
        """Queue a new attempt of the job, which has ended; see `DistillClient.resume`."""
        return self.client.resume(self.id, max_steps=max_steps, from_step=from_step)

    def pull(self, destination: Path | str, *, checkpoint: Checkpoint | None = None) -> Path:
        """Download the export or a checkpoint into a new directory; see `DistillClient.pull`."""
        return self.client.pull(self.id, destination, checkpoint=checkpoint)


def handle_of(client: DistillClient, job: pb.Job) -> JobHandle:
    """Return the handle of a job that the server of `client` has sent."""
    return JobHandle(
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=JobState(pb.JobState.Name(job.state)),
        reason=job.reason,
        phase=job.phase,
        attempt=job.attempt,
        step=job.step,
        max_steps=job.max_steps,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        last_seq=job.last_seq,
        metrics=dict(job.metrics),
        config_json=job.config_json,
        checkpoints=tuple(job.checkpoints),
        client=client,
    )
