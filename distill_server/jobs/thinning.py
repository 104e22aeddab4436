"""Deletes old events of long jobs, to bound the number of events.

A job keeps its newest NEWEST events, all changes of state, attempt or reason, all evaluations, and
at most OLDER other steps, at multiples of a power of two.
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
    """Delete old events of a job at every 500th event; call it for each event, in a transaction.

    `last_seq` is that of the new event. A job then has at most NEWEST + OLDER + _EVERY events, not
    counting evaluations and changes of state. Takes about 3 ms.
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
        [(job_id, seq) for seq in _select_deletions(rows)],
    )


def _select_deletions(rows: Sequence[sqlite3.Row]) -> Iterable[int]:
    """Return the seqs of the events to delete. `rows` are in order of seq."""
    step_by_seq = {
        row["seq"]: row["step"] if row["metrics"] != "{}" else None
        for previous, row in pairwise(rows)
        if _EVALUATION not in row["metrics"] and _state_of(previous) == _state_of(row)
    }
    stride = 1
    while sum(_is_kept(step, stride) for step in step_by_seq.values()) > OLDER:
        stride *= 2
    return [seq for seq, step in step_by_seq.items() if not _is_kept(step, stride)]


def _is_kept(step: int | None, stride: int) -> bool:
    """Return whether an event is kept: steps at multiples of the stride, and no phases (None)."""
    return step is not None and step % stride == 0


def _state_of(row: sqlite3.Row) -> tuple[object, ...]:
    return row["state"], row["attempt"], row["reason"]
