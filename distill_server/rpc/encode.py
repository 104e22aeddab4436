"""Conversion of jobs, events and states to and from protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence

from clients.jobs.job import Job, JobEvent, JobState
from clients.teacher.info import TeacherLoad
from distill_server.jobs.rows import JobFilter
from distill_server.teachers.started import TeacherProcess
from protos import distill_pb2 as pb
from protos.auth.access import Caller
from protos.errors import InvalidInput


def encode_job(job: Job, dependencies: Sequence[str] = ()) -> pb.Job:
    """Return the message for a job, without `config_json` and `checkpoints`, to keep lists small.

    `dependencies` are the ids of the jobs that must succeed before the job starts.
    """
    return pb.Job(
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=pb.JobState.Value(job.state),
        reason=job.reason,
        phase=job.phase,
        attempt=job.attempt,
        step=job.step,
        max_steps=job.max_steps,
        metrics=job.metrics,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        last_seq=job.last_seq,
        pinned=job.pinned,
        owner=job.owner,
        labels=job.labels,
        dependencies=dependencies,
    )


def encode_event(event: JobEvent) -> pb.JobEvent:
    """Return the message for one event of a job."""
    return pb.JobEvent(
        seq=event.seq,
        time=event.time,
        state=pb.JobState.Value(event.state),
        reason=event.reason,
        phase=event.phase,
        attempt=event.attempt,
        step=event.step,
        max_steps=event.max_steps,
        metrics=event.metrics,
    )


def encode_teacher(
    teacher: TeacherProcess, jobs: Sequence[str], load: TeacherLoad | None = None
) -> pb.StartedTeacher:
    """Return the message for a teacher of the server. `jobs`: the active jobs that use it."""
    link = teacher.record.link
    return pb.StartedTeacher(
        key=teacher.key,
        model=link.model or "",
        engine=link.engine,
        state=teacher.state,
        address=teacher.address,
        jobs=jobs,
        gpus=teacher.record.gpus or (),
        since=teacher.since,
        attempt=teacher.record.attempt,
        reason=teacher.failure or teacher.trouble,
        queued_tokens=load.queued_tokens if load else 0,
        active_streams=load.active_streams if load else 0,
    )


def decode_state(state: pb.JobState.ValueType) -> JobState | None:
    """Return the state, or None if unspecified. Raises InvalidInput for an unknown number."""
    if state not in pb.JobState.values():
        raise InvalidInput(f"there is no job state with number {state}", field="state")
    return JobState(pb.JobState.Name(state)) if state else None


def decode_filter(request: pb.ListJobsRequest, caller: Caller, now: float) -> JobFilter:
    """Return the filter of a list. Raises InvalidInput for `mine` if the caller has no owner.

    `now` is the current time of the server in Unix seconds.
    """
    if request.mine and not caller.owner:
        raise InvalidInput(
            "the token has no owner, so it has no jobs",
            field="mine",
            hint="add owner=NAME to the line of the token in the server's --token-file",
        )
    if not request.older_than_seconds >= 0:
        raise InvalidInput("must be at least 0", field="older_than_seconds")
    owner = caller.owner if request.mine else request.owner
    states = [decode_state(state) for state in (request.state, *request.states)]
    before = now - request.older_than_seconds if request.older_than_seconds else None
    return JobFilter("", [*filter(None, states)], owner, dict(request.labels), before)
