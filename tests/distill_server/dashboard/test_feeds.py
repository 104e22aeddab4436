"""The event streams of a job and of the list."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distill_server.dashboard import feeds
from distill_server.dashboard.feeds import Turns, job_messages, list_messages, stored_steps
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Change, JobStore
from protos.errors import Unavailable
from tests.distill_server.conftest import job_config


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


def test_a_job_is_sent_in_columns_of_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past and later events arrive once, in order, with a null for each missing metric."""
    monkeypatch.setattr(feeds, "_PAGE_EVENTS", 40)

    async def follow(store: JobStore, notifier: ChangeNotifier) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        messages = job_messages(store, notifier, "job", 0)
        assert (await anext(messages)).startswith("event: extremes\n")
        while not sent or sent[-1]["seq"] < store.job("job").last_seq:
            sent += read_events(await anext(messages))
        for step in (101, 102):
            store.change("job", Change(step=step, metrics={"loss": 1.0}))
        return sent + read_events(await anext(messages))

    with open_database(tmp_path / "jobs.sqlite") as connection:
        connection.execute("PRAGMA synchronous = OFF")
        notifier = ChangeNotifier()
        store = JobStore(connection, on_change=notifier.notify)
        store.add("job", job_config(), "")
        for step in range(1, 101):
            metrics = {"loss": step / 3} | ({"eval/kl": 0.25} if step % 10 == 0 else {})
            store.change("job", Change(step=step, metrics=metrics))
        sent = asyncio.run(follow(store, notifier))
        stored = [asdict(event) for event in store.events("job", 0, 999)]
        whole, rest = (stored_steps(store, "job", seq) for seq in (0, 100))
    assert whole["extremes"] == {"attempt": 0, "curves": {}}
    assert rest["extremes"] is None
    assert [record["events"]["seq"][0] for record in (whole, rest)] == [1, 101]
    assert [event | {"metrics": {}} for event in sent] == [
        event | {"metrics": {}} for event in stored
    ]
    for event, expected in zip(sent, stored, strict=True):
        assert event["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)


def read_events(message: str) -> list[dict[str, Any]]:
    """Return the records of the columns in a message."""
    columns = json.loads(message.split("data: ")[1])
    metrics = columns.pop("metrics")
    return [
        {
            **{name: column[row] for name, column in columns.items()},
            "metrics": {
                name: column[row] for name, column in metrics.items() if column[row] is not None
            },
        }
        for row in range(len(columns["seq"]))
    ]
