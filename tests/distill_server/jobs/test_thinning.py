"""Old events of long jobs are thinned; changes of state, and few evaluations, are kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from clients.config.tables.common import CheckpointConfig
from clients.jobs.job import JobEvent, JobState
from clients.jobs.record import points_of
from distill_server.jobs.database import NEWEST, OLDER, open_database
from distill_server.jobs.store import Change, JobStore
from tests.distill_server.conftest import job_config

STEPS, EVERY = 20_000, 100


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[JobEvent]]:
    """The events of a job with an evaluation and its phase every 100 steps, and a retry."""
    root = tmp_path_factory.mktemp("thinning")
    with open_database(root / "server.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        store = JobStore(connection, on_change=lambda job_id: None)
        for name in ("long", "other"):
            store.add(name, job_config(), "")
            store.change(name, Change(JobState.PREPARING), Change(JobState.RUNNING))
        changes = []
        for step in range(1, STEPS + 1):
            metrics = {"loss": 1 / step} | ({"eval/kl": step} if step % EVERY == 0 else {})
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
        yield list(store.events("long", 0, 99_999))


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
