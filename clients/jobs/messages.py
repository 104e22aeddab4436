"""Conversion of protobuf messages to the return values of DistillClient."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from clients.config.kinds import AnyJob
from clients.jobs.job import UNKNOWN, JobEvent, JobState, StartedTeacher
from protos import distill_pb2 as pb
from protos.errors import InvalidInput, WrongState

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
# In the errors of servers, whose jobs are pydantic models.
_UNKNOWN_KEY = re.compile(r"([\w.]+): Extra inputs are not permitted")


def values_of(job: pb.Job) -> dict[str, Any]:
    """Convert the server's message about a job to the arguments of `Job`."""
    return {
        "id": job.id,
        "name": job.name,
        "kind": job.kind,
        "state": _state_of(job.state),
        "reason": job.reason,
        "phase": job.phase,
        "attempt": job.attempt,
        "step": job.step,
        "max_steps": job.max_steps,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "last_seq": job.last_seq,
        "metrics": dict(job.metrics),
        "config_json": job.config_json,
        "checkpoints": tuple(job.checkpoints),
        "pinned": job.pinned,
        "owner": job.owner,
        "labels": dict(job.labels),
        "dependencies": tuple(job.dependencies),
    }


def event_of(event: pb.JobEvent) -> JobEvent:
    """Convert the server's message about an event to a JobEvent."""
    return JobEvent(
        seq=event.seq,
        time=event.time,
        state=_state_of(event.state),
        reason=event.reason,
        phase=event.phase,
        attempt=event.attempt,
        step=event.step,
        max_steps=event.max_steps,
        metrics=dict(event.metrics),
    )


def _state_of(number: pb.JobState.ValueType) -> JobState:
    """Return the JobState of a protobuf number.

    Returns UNKNOWN for a state that only a newer server has.
    """
    is_known = number and number in pb.JobState.values()
    return JobState(pb.JobState.Name(number)) if is_known else UNKNOWN


def teacher_of(teacher: pb.StartedTeacher) -> StartedTeacher:
    """Convert the server's message about a teacher to a StartedTeacher."""
    return StartedTeacher(
        key=teacher.key,
        model=teacher.model,
        engine=teacher.engine,
        state=teacher.state,
        address=teacher.address,
        jobs=tuple(teacher.jobs),
        gpus=tuple(teacher.gpus),
        since=teacher.since,
        attempt=teacher.attempt,
        reason=teacher.reason,
        queued_tokens=teacher.queued_tokens,
        active_streams=teacher.active_streams,
    )


def send_known_keys(send: Callable[[Collection[str]], _Answer]) -> _Answer:
    """Send jobs to a server that may be older than this client. Return the server's answer.

    `send`: a function that sends the jobs and returns the answer. Its argument is a set of keys of
    job files to omit (see `config_json`). The first call omits no key. If the server refuses
    unknown keys, the next call omits them. Raises the error of the server if it refuses the jobs
    for another reason.
    """
    omitted_keys: set[str] = set()
    while True:
        try:
            answer = send(omitted_keys)
        except InvalidInput as fault:
            # The server cuts a long message, so the next one may name further keys.
            new_keys = set(_UNKNOWN_KEY.findall(str(fault))) - omitted_keys
            if not new_keys:
                raise
            omitted_keys |= new_keys
        else:
            if omitted_keys:
                keys = ", ".join(sorted(omitted_keys))
                log.warning("the server is of an older version, without the keys %s", keys)
            return answer


def config_json(config: AnyJob, omitted_keys: Collection[str] = ()) -> str:
    """Return a job as JSON. Leave out each key of `omitted_keys` if its value is the default.

    A key is a path such as `data.path`.
    """
    if not omitted_keys:
        return config.model_dump_json()
    document = json.loads(config.model_dump_json())
    changed_values = config.model_dump(exclude_defaults=True)
    for key in omitted_keys:
        path = key.split(".")
        if _table_at(changed_values, path) is None and (table := _table_at(document, path)):
            del table[path[-1]]
    return json.dumps(document)


def _table_at(document: Any, path: Sequence[str]) -> dict[str, Any] | None:
    """Return the table of `document` that contains the last key of `path`.

    `path`: the parts of a key such as `data.path`. Returns None if the document does not have the
    key.
    """
    for name in path[:-1]:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) and path[-1] in document else None


def require_filtered(
    response: pb.ListJobsResponse,
    owner: str,
    own_only: bool,
    labels: Mapping[str, str],
    older_than_seconds: float,
) -> None:
    """Raise WrongState if the server ignored a filter of a list, because the server is too old.

    The filters are `owner`, `own_only`, `labels` and `older_than_seconds`.
    """
    if older_than_seconds and not response.time:
        raise WrongState(
            "the version of this server cannot choose jobs by their age",
            hint="upgrade the server, or choose the jobs by their names",
        )
    for job in response.jobs:
        has_owner = bool(job.owner) if own_only else owner in ("", job.owner)
        if not has_owner or not labels.items() <= dict(job.labels).items():
            raise WrongState(
                "the version of this server has no owners and labels of jobs",
                hint="upgrade the server, or choose the jobs by their names",
            )
