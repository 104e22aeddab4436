"""Old events of long jobs are thinned; changes of state, and few evaluations, are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.config.tables.common import CheckpointConfig
from clients.jobs.job import JobEvent, JobState
from clients.jobs.record import points_of
from distill_server.jobs.database import NEWEST, OLDER, open_database
from distill_server.jobs.extremes import PARTS, Extremes, add_extremes, read_extremes
from distill_server.jobs.store import Change, JobStore
from tests.distill_server.conftest import job_config

STEPS, EVERY = 20_000, 100
NORMS = np.random.default_rng(0).lognormal(size=STEPS + 1).tolist()


@dataclass(frozen=True)
class Thinned:
    events: list[JobEvent]
    extremes: Extremes


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Thinned:
    """A job with an evaluation and its phase every 100 steps, and a retry."""
    root = tmp_path_factory.mktemp("thinning")
    with open_database(root / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        store = JobStore(connection, on_change=lambda job_id: None)
        for name in ("long", "other"):
            store.add(name, job_config(), "")
            store.change(name, Change(JobState.PREPARING), Change(JobState.RUNNING))
        changes = []
        for step in range(1, STEPS + 1):
            metrics = {"loss": 1 / step, "grad_norm": NORMS[step]}
            if step % EVERY == 0:
                metrics["eval/kl"] = step
            changes.append(Change(step=step, metrics=metrics))
            if step % EVERY == 0:
                changes += [Change(phase="evaluating"), Change(phase="training")]
            if step == STEPS // 3:
                changes += [Change(JobState.QUEUED, reason="died"), Change(JobState.PREPARING)]
                changes += [Change(JobState.RUNNING, reason="")]
        for start in range(0, len(changes), 50):
            store.change("long", *changes[start : start + 50])
        store.change("other", *[Change(step=n, metrics={"loss": n}) for n in range(1, 900)])
        assert len(store.events("other", 0, 9999)) == 902, "a short job keeps all of its events"
        return Thinned(list(store.events("long", 0, 99_999)), store.extremes("long"))


@pytest.fixture
def events(job: Thinned) -> list[JobEvent]:
    return job.events


def test_their_number_has_a_bound(events: list[JobEvent]) -> None:
    evaluations = STEPS // EVERY
    assert NEWEST < len(events) <= NEWEST + OLDER + 500 + evaluations + 5


def test_the_newest_the_evaluations_and_the_states_are_kept(events: list[JobEvent]) -> None:
    last_seq = events[-1].seq
    assert [event.seq for event in events[-NEWEST:]] == list(
        range(last_seq - NEWEST + 1, last_seq + 1)
    )
    evaluation_steps = [event.step for event in events if "eval/kl" in event.metrics]
    assert evaluation_steps == list(range(EVERY, STEPS + 1, EVERY))
    # Newer events may not have been thinned yet.
    states = [event.state for event in events[: -2 * NEWEST] if not event.metrics]
    assert states == [
        *(JobState.QUEUED, JobState.PREPARING, JobState.RUNNING),
        *(JobState.QUEUED, JobState.PREPARING, JobState.RUNNING),
    ]


def test_the_steps_that_are_left_are_spread_evenly(events: list[JobEvent]) -> None:
    steps = [point.step for point in points_of(events) if "eval/kl" not in point.metrics]
    old = [step for step in steps if step < STEPS - 2 * NEWEST]
    assert len(old) >= OLDER // 2
    # Gaps are powers of two; events since the last thinning are not thinned yet.
    assert max(b - a for a, b in pairwise(old)) <= 128


def test_the_extremes_of_a_curve_are_kept(job: Thinned) -> None:
    """The oracle has all steps: in each of 79 parts, the job has the same lowest and highest
    value.
    """
    points = job.extremes.curves["grad_norm"]
    assert len(points) <= 2 * PARTS
    kept = [*points, *((point.step, point.metrics["grad_norm"]) for point in points_of(job.events))]
    norms = np.array(NORMS)
    length = 256  # the smallest power of two with at most 128 parts
    assert STEPS // length < PARTS <= STEPS // (length // 2)
    for first in range(0, STEPS, length):
        part = norms[max(1, first) : first + length]
        shown = [value for step, value in kept if first <= step < first + length]
        assert (min(shown), max(shown)) == (part.min(), part.max())


def test_the_extremes_of_repeated_steps_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    """The events are deleted in turns, as of a job whose attempts repeat steps."""
    noise = np.random.default_rng(1)
    values: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    with open_database(tmp_path / "server.sqlite") as connection:
        JobStore(connection, on_change=lambda job_id: None).add("job", job_config(), "")
        for attempt, first, last in ((1, 1, 900), (2, 400, 1500), (3, 1450, 2100)):
            values = {step: value for step, value in values.items() if step < first}
            for step in range(first, last + 1):
                values[step] = float(noise.normal())
                metrics = json.dumps({"loss": values[step]})
                seq = rows[-1]["seq"] + 1 if rows else 1
                rows.append({"seq": seq, "step": step, "attempt": attempt, "metrics": metrics})
                if step % 100 == 0:
                    deleted = {row["seq"] for row in rows if row["step"] != first}
                    add_extremes(connection, "job", rows, deleted)
                    rows = [row for row in rows if row["seq"] not in deleted]
        extremes = read_extremes(connection, "job")
    assert extremes.attempt == 3
    kept = dict(extremes.curves["loss"]) | {400: values[400], 1450: values[1450]}
    assert all(values[step] == value for step, value in kept.items())
    length = 32
    assert 2100 // length < PARTS <= 2100 // (length // 2)
    for start in range(0, 2101, length):
        part = [value for step, value in values.items() if start <= step < start + length]
        shown = [value for step, value in kept.items() if start <= step < start + length]
        assert (min(shown), max(shown)) == (min(part), max(part))


def test_a_job_that_is_evaluated_at_every_step(tmp_path: Path) -> None:
    """The evaluations that select its best checkpoint are kept."""
    config = job_config().model_copy(update={"checkpoint": CheckpointConfig(every=30)})
    best = {1_230: 0.2, 1_231: 0.1}  # of the checkpoints, and of all steps
    with open_database(tmp_path / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        store = JobStore(connection, on_change=lambda job_id: None)
        store.add("long", config, "")
        store.change("long", Change(JobState.PREPARING), Change(JobState.RUNNING))
        for start in range(0, 5000, 50):
            changes = [
                Change(step=step, metrics={"eval/kl": best.get(step, 0.5)})
                for step in range(start + 1, start + 51)
            ]
            store.change("long", *changes)
        steps = [event.step for event in store.events("long", 0, 9999) if event.metrics]
    assert len(steps) <= NEWEST + OLDER + 500 + len(best)
    assert steps[-NEWEST:] == list(range(5001 - NEWEST, 5001))
    assert best.keys() <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 16, "spread over the whole run"


def test_a_step_that_many_attempts_evaluate(tmp_path: Path) -> None:
    """A job whose teacher is away for a day evaluates its student before the first step of each."""
    with open_database(tmp_path / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        store = JobStore(connection, on_change=lambda job_id: None)
        store.add("waiting", job_config(), "")
        store.change("waiting", Change(JobState.PREPARING), Change(JobState.RUNNING))
        for _ in range(100):
            store.change("waiting", *[Change(step=0, metrics={"eval/kl": 0.5})] * 30)
        events = [event for event in store.events("waiting", 0, 9999) if event.metrics]
    assert NEWEST <= len(events) <= NEWEST + OLDER + 500
