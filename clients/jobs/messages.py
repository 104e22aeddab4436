"""Conversion of protobuf messages to the values that DistillClient returns."""

from __future__ import annotations

from clients.jobs.job import JobEvent, JobState, StartedTeacher
from protos import distill_pb2 as pb


def event_of(event: pb.JobEvent) -> JobEvent:
    """Return an event of a job."""
    return JobEvent(
        seq=event.seq,
        time=event.time,
        state=JobState(pb.JobState.Name(event.state)),
        reason=event.reason,
        phase=event.phase,
        attempt=event.attempt,
        step=event.step,
        max_steps=event.max_steps,
        metrics=dict(event.metrics),
    )


def teacher_of(one: pb.StartedTeacher) -> StartedTeacher:
    """Return a teacher of a server."""
    return StartedTeacher(
        *(one.key, one.model, one.engine, one.state, one.address, tuple(one.jobs)),
        *(tuple(one.gpus), one.since, one.attempt, one.reason, one.kept),
        *(one.queued_tokens, one.active_streams),
    )
