"""Thins the old events of long jobs, so that their number has a bound.

Of a job's events these are kept: the newest NEWEST; changes of the state, the attempt or the
reason; evaluations; and of the other steps at most OLDER, those at multiples of a power of two.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import pairwise

NEWEST = OLDER = 500
# A job is thinned when it has got this many more events.
_EVERY = 500
# Part of the JSON text of the metrics of an evaluation.
_EVALUATION = '"eval/'


def thin_events(connection: sqlite3.Connection, job_id: str, last_seq: int) -> None:
    """Delete old events of a job, if it is time to; call it for each new event, in a transaction.

    `last_seq` is that of the new event. So a job has at most NEWEST + OLDER + _EVERY events besides
    its evaluations and changes of state. It takes about 3 ms, at every 500th event.
    """
    if last_seq % _EVERY or last_seq <= NEWEST + OLDER:
        return
    rows = connection.execute(
        "SELECT seq, step, metrics, state, attempt, reason FROM events"
        " WHERE job_id = ? AND seq <= ? ORDER BY seq",
        (job_id, last_seq - NEWEST),
    ).fetchall()
    connection.executemany(
        "DELETE FROM events WHERE job_id = ? AND seq = ?",
        [(job_id, seq) for seq in _superfluous(rows)],
    )


def _superfluous(rows: Sequence[sqlite3.Row]) -> Iterable[int]:
    """Return the seqs of the events to delete. `rows` are in order of seq."""
    plain = {
        row["seq"]: row["step"] if row["metrics"] != "{}" else None
        for before, row in pairwise(rows)
        if _EVALUATION not in row["metrics"] and _state_of(before) == _state_of(row)
    }
    stride = 1
    while sum(_is_kept(step, stride) for step in plain.values()) > OLDER:
        stride *= 2
    return [seq for seq, step in plain.items() if not _is_kept(step, stride)]


def _is_kept(step: int | None, stride: int) -> bool:
    """Return whether an event is kept: steps at multiples of the stride, and no phases (None)."""
    return step is not None and step % stride == 0


def _state_of(row: sqlite3.Row) -> tuple[object, ...]:
    return row["state"], row["attempt"], row["reason"]
