"""Records of the job database other than `Job`, conversion of database rows, search filters."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clients.config.kinds import AnyJob
from clients.jobs.job import Job, JobState
from distill_server.runners.machine import Share
from protos.errors import InvalidInput

PHASE_CHARS = 200  # a longer phase is cut


@dataclass(frozen=True)
class Attempt:
    """One run of the job's program.

    - retries: number of automatic retries since the last submit or resume by a user.
    - from_step: step of the checkpoint to start from; None means the newest checkpoint.
    - seen_step: newest step with metrics in the job's events; -1 means no step.
    - waiting_since: Unix time when an attempt first ended for a reason outside the job (for
      example, an unreachable teacher), with no new step since then; 0 otherwise.
    - waits_for: key of an unreachable service, such as `teacher.address`; the attempt starts when
      the service answers.
    """

    number: int
    retries: int = 0
    from_step: int | None = None
    seen_step: int = -1
    waiting_since: float = 0.0
    waits_for: str = ""


@dataclass(frozen=True)
class Change:
    """New values of a job's fields, recorded as one event. None keeps the old value.

    `metrics` are the metrics of `step`. `max_steps` is set by a change only for jobs whose
    configuration has no `max_steps`.
    """

    state: JobState | None = None
    reason: str | None = None
    phase: str | None = None
    step: int | None = None
    max_steps: int | None = None
    metrics: Mapping[str, float] | None = None

    def is_phase_of(self, job: Job) -> bool:
        """Return True if the change only sets the phase that the job already has."""
        phase = self.phase
        return (
            phase is not None and self == Change(phase=phase) and phase[:PHASE_CHARS] == job.phase
        )


@dataclass(frozen=True)
class NewJob:
    """A job to add.

    - config: the configuration, in which other jobs are named by their ids.
    - submitted_config: the configuration from the client, in which other jobs are named as in the
      job file.
    - key: the idempotency key; "" means no key.
    - dependencies: ids of the jobs that must succeed before this job starts.
    - owner: owner of the token that submitted the job.
    - waits_for: key of a teacher that is unreachable or still loads its model; "" if the job need
      not wait.
    """

    id: str
    config: AnyJob
    submitted_config: AnyJob
    key: str = ""
    dependencies: Sequence[str] = ()
    owner: str = ""
    waits_for: str = ""


@dataclass(frozen=True)
class JobFilter:
    """Selects the jobs that fulfil all of these conditions.

    - search: every word is in the id, name, state, owner or labels of the job. Labels are searched
      as NAME=VALUE. The case of ASCII letters is ignored.
    - states: the job is in one of these states; empty: any state.
    - owner: owner of the job; "": any owner.
    - labels: the job has all of these labels.
    - before: the job ended before this Unix time; for a job that has not ended, the time of
      submission is compared.
    """

    search: str = ""
    states: Sequence[JobState] = ()
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    before: float | None = None

    def condition(self) -> tuple[str, dict[str, str | float]]:
        """Return an SQL condition on rows of `jobs`, and its parameters."""
        parameters: dict[str, str | float] = {
            f"word{number}": word for number, word in enumerate(self.search.split())
        }
        text = "lower(id || ' ' || name || ' ' || state || ' ' || owner || ' ' || labels)"
        pair = "instr(lower(key || '=' || value), lower(:{}))"
        terms = ["1"]
        for name, word in list(parameters.items()):
            term = f"instr({text}, lower(:{name}))"
            if "=" in str(word):
                labelled = f"SELECT 1 FROM json_each(labels) WHERE {pair.format(name)}"
                term = f"({term} OR EXISTS ({labelled}))"
            terms.append(term)
        if self.states:
            state_names = {f"state{number}": state for number, state in enumerate(self.states)}
            terms.append(f"state IN ({', '.join(f':{name}' for name in state_names)})")
            parameters |= state_names
        if self.before is not None:
            terms.append("coalesce(nullif(ended_at, 0), created_at) <= :latest")
            parameters["latest"] = self.before
        if self.owner:
            terms.append("owner = :owner")
            parameters["owner"] = self.owner
        for number, (key, label) in enumerate(self.labels.items()):
            comparison = f"key = :label{number} AND value = :value{number}"
            terms.append(f"EXISTS (SELECT 1 FROM json_each(labels) WHERE {comparison})")
            parameters |= {f"label{number}": key, f"value{number}": label}
        return " AND ".join(terms), parameters


_SECONDS = "CASE WHEN started_at THEN coalesce(nullif(ended_at, 0), :now) - started_at END"
_ORDERS = {
    "submitted": "number",
    "name": "lower(name)",
    "state": "state",
    "progress": "CASE WHEN max_steps THEN 1.0 * step / max_steps END",
    "time": _SECONDS,
    "owner": "owner",
}


@dataclass(frozen=True)
class ListOrder:
    """The order of a list of jobs: ascending by `key`, or descending with `reverse`.

    Jobs without a value come last. Jobs with equal values are in the order of submission, newest
    first. Raises InvalidInput for an unknown key.
    """

    key: str = "submitted"
    reverse: bool = True

    def __post_init__(self) -> None:
        if self.key not in _ORDERS:
            expected = ", ".join(_ORDERS)
            raise InvalidInput(f"got {self.key!r}, expected one of {expected}", field="sort")

    def terms(self) -> str:
        """Return the terms of an SQL ORDER BY on rows of `jobs`; `:now` is the time in seconds."""
        value = _ORDERS[self.key]
        direction = "DESC" if self.reverse else "ASC"
        if self.key == "submitted":  # the order of the rows, so SQLite does not sort
            return f"{value} {direction}"
        return f"{value} IS NULL, {value} {direction}, number DESC"


NEWEST_FIRST = ListOrder()


@dataclass
class Tally:
    """Counts since the store was opened.

    - attempts: number of attempts that were inserted.
    - retries: number of attempts that were started because a trainer died.
    - ends: number of ended jobs by state.
    """

    attempts: int = 0
    retries: int = 0
    ends: Counter[JobState] = field(default_factory=Counter)


def job_of(row: sqlite3.Row) -> Job:
    """Return the Job of a row of the table `jobs`; the row has all columns."""
    values = parse_row(row)
    for name in ("number", "place", "priority", "queued_at", "imported_at"):
        del values[name]
    labels = json.loads(values["labels"])
    return Job(**values | {"pinned": bool(values["pinned"]), "labels": labels})


def share_of(row: sqlite3.Row) -> Share:
    """Return the CPU threads and GPUs of an attempt, from the columns cpus and gpus of its row."""
    gpus = row["gpus"]
    return Share(row["cpus"], None if gpus is None else tuple(filter(None, gpus.split(","))))


def parse_row(row: sqlite3.Row) -> dict[str, Any]:
    """Return the columns of a row of `jobs` or `events`, with `state` and `metrics` parsed."""
    values = dict(row)
    return {
        **values,
        "state": JobState(values["state"]),
        "metrics": json.loads(values["metrics"]),
    }
