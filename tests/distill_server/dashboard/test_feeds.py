"""The history of a long job is thinned without losing what a curve shows."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from clients.jobs.job import JobEvent, JobState
from distill_server.dashboard import feeds
from distill_server.dashboard.feeds import Turns, job_messages, list_messages, thin_for_chart
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Change, JobStore
from protos.errors import Unavailable
from tests.distill_server.conftest import job_config

EVENT = JobEvent(1, 0.0, JobState.RUNNING, "", "training", 1, 1, 100)


def events(count: int, attempt: int = 1) -> list[JobEvent]:
    return [
        replace(EVENT, seq=n, step=n, attempt=attempt, metrics={"loss": float(n)})
        for n in range(1, count + 1)
    ]


def test_groups_are_their_last_event_with_means() -> None:
    thinned = thin_for_chart(events(10), 4)
    assert [(event.seq, event.metrics["loss"]) for event in thinned] == [
        (4, 2.5),
        (8, 6.5),
        (10, 9.5),
    ]


def test_a_rare_metric_survives() -> None:
    rare = events(9)
    rare[4] = replace(rare[4], metrics={"loss": 5.0, "eval/kl": 0.25})
    assert [event.metrics.get("eval/kl") for event in thin_for_chart(rare, 9)] == [0.25]


def test_attempts_are_never_mixed() -> None:
    thinned = thin_for_chart([*events(3), *events(3, attempt=2)], 4)
    assert [(event.attempt, event.metrics["loss"]) for event in thinned] == [(1, 2.0), (2, 2.0)]


def test_the_list_is_told_when_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often jobs change, queries are rate-limited; a query with no news sends no
    message.
    """
    monkeypatch.setattr(feeds, "_SECONDS_BETWEEN_QUERIES", 0.01)
    looks = []

    async def follow(store: JobStore, notifier: ChangeNotifier) -> None:
        def look() -> list[str]:
            looks.append(1)
            return [f"{job.id} {job.step}" for job in store.page(limit=2)]

        messages = list_messages(notifier, Turns(), look)
        assert read_page(await anext(messages)) == []
        store.add("one", job_config(), "")
        assert read_page(await anext(messages)) == ["one 0"]
        for step in range(1, 101):
            store.change("one", Change(step=step, metrics={"loss": 1.0}))
        assert read_page(await anext(messages)) == ["one 100"]
        for name in ("two", "three"):
            store.add(name, job_config(), "")
        assert read_page(await anext(messages)) == ["three 0", "two 0"]
        pending = asyncio.ensure_future(anext(messages))
        looks_before = len(looks)
        store.change("one", Change(step=101, metrics={"loss": 1.0}))  # on another page
        while len(looks) == looks_before:
            await asyncio.sleep(0.01)
        assert not pending.done()
        notifier.close()
        with pytest.raises(Unavailable):
            await pending

    with open_database(tmp_path / "jobs.sqlite") as connection:
        notifier = ChangeNotifier()
        asyncio.run(follow(JobStore(connection, on_change=notifier.notify), notifier))
    assert len(looks) < 10


def test_many_readers_leave_half_of_the_time_to_everybody_else() -> None:
    """However slow a query is, the pause after it is at least as long as the query."""
    looks: list[tuple[float, float]] = []

    def look() -> list[str]:
        start_time = time.monotonic()
        while time.monotonic() < start_time + 0.003:
            pass
        looks.append((start_time, time.monotonic()))
        return []

    async def read() -> None:
        turns, notifier = Turns(), ChangeNotifier()
        await asyncio.gather(*(anext(list_messages(notifier, turns, look)) for _ in range(20)))

    asyncio.run(read())
    assert len(looks) == 20
    for (start_time, end_time), (next_start, _) in pairwise(looks):
        assert next_start - end_time >= 0.9 * (end_time - start_time)


def read_page(message: str) -> list[str]:
    assert message.startswith("event: page\n")
    lines: list[str] = json.loads(message.split("data: ")[1])
    return lines


def test_groups_of_one_change_nothing() -> None:
    assert thin_for_chart(events(5), 1) == events(5)
    assert thin_for_chart([], 3) == []


def test_a_long_past_is_thinned_and_the_present_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_MAX_POINTS", 50)
    monkeypatch.setattr(feeds, "_PAGE_EVENTS", 40)

    async def follow(store: JobStore, notifier: ChangeNotifier) -> list[dict[str, float]]:
        points: list[dict[str, float]] = []
        messages = job_messages(store, notifier, "job", 0)
        while not points or points[-1]["seq"] < store.job("job").last_seq:
            points += json.loads((await anext(messages)).split("data: ")[1])
        past_count = len(points)
        assert past_count <= 50 + 500 / 40
        for step in (501, 502, 503):
            store.change("job", Change(step=step, metrics={"loss": float(step)}))
        points += json.loads((await anext(messages)).split("data: ")[1])
        assert [event["step"] for event in points[past_count:]] == [501, 502, 503]
        return points

    with open_database(tmp_path / "jobs.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        notifier = ChangeNotifier()
        store = JobStore(connection, on_change=notifier.notify)
        store.add("job", job_config(), "")
        for step in range(1, 501):
            store.change("job", Change(step=step, metrics={"loss": float(step)}))
        points = asyncio.run(follow(store, notifier))
    steps = [event["step"] for event in points]
    assert steps == sorted(steps)
    assert {500, 503} <= set(steps)
