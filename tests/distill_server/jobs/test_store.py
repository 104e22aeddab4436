from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.job import JobState
from distill_server.jobs.database import open_database
from distill_server.jobs.rows import JobFilter, ListOrder
from distill_server.jobs.store import Attempt, Change, JobStore
from protos.errors import Corrupt, InvalidInput, NotFound, Unavailable, WrongState
from tests.distill_server.conftest import job_config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with open_database(tmp_path / "server.sqlite") as connection:
        yield JobStore(connection, on_change=lambda job_id: None)


def test_files_are_private(tmp_path: Path) -> None:
    os.umask(0o022)
    with open_database(tmp_path / "server.sqlite") as connection:
        JobStore(connection, on_change=lambda job_id: None).add("a", job_config(), "")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert set(modes) >= {"server.sqlite", "server.sqlite-wal", "server.lock"}
    assert set(modes.values()) == {0o600}


def test_writes_are_durable_in_wal_mode(tmp_path: Path) -> None:
    with open_database(tmp_path / "server.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


def test_second_process_is_refused_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from distill_server.jobs.database import open_database\n"
        "with open_database(pathlib.Path(sys.argv[1])): pass\n"
    )
    path = tmp_path / "server.sqlite"
    with open_database(path):
        start_time = time.monotonic()
        with pytest.raises(WrongState, match="another server uses"), open_database(path):
            pass
        assert time.monotonic() - start_time < 10
        second_server = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
        assert "another server uses" in second_server.stderr
    with open_database(path):
        pass


def test_damaged_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    with open_database(path) as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        for number in range(200):
            store.add(f"job-{number}", job_config(), "")
    content = bytearray(path.read_bytes())
    content[5000:60000] = os.urandom(55000)
    path.write_bytes(content)
    with pytest.raises(Corrupt, match="is damaged"), open_database(path):
        pass
    path.write_bytes(b"not a database at all, but long enough" * 100)
    with pytest.raises(Corrupt, match="is damaged"), open_database(path):
        pass


def test_schema_of_the_future_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    with open_database(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(WrongState, match="schema version 99"), open_database(path):
        pass


def test_full_disk_is_unavailable_and_changes_nothing(tmp_path: Path) -> None:
    with open_database(tmp_path / "server.sqlite") as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        store.add("a", job_config(), "")
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Unavailable, match="full"):
            store.change("a", *(Change(phase="xy"[n % 2] * 1000) for n in range(100)))
        assert store.job("a").last_seq == 1
        connection.execute("PRAGMA max_page_count = 100000")
        assert store.change("a", Change(phase="again")).last_seq == 2


def test_a_phase_that_is_told_again_is_no_event(store: JobStore) -> None:
    """Also a long phase: a waiting job repeats its phase several times a second."""
    store.add("a", job_config(), "")
    for _ in range(3):
        assert store.change("a", Change(phase="x" * 1000)).last_seq == 2
    assert store.change("a", Change(phase="y" * 1000)).last_seq == 3
    assert store.change("a", Change(phase="y" * 1000, step=1)).last_seq == 4


def test_resolve(store: JobStore) -> None:
    with pytest.raises(NotFound):
        store.resolve("@last")
    for job_id in ("run-a1", "run-a2", "run-a", "other-1"):
        store.add(job_id, job_config(), "")
    assert store.resolve("oth").id == "other-1"
    assert store.resolve("run-a").id == "run-a"
    assert store.resolve("@last").id == "other-1"
    with pytest.raises(InvalidInput, match="run-a, run-a1, run-a2"):
        store.resolve("run")
    for unknown_name in ("", "x", "run-a1x", "%", "RUN"):
        with pytest.raises(NotFound):
            store.resolve(unknown_name)


def test_pages_cover_everything_once(store: JobStore) -> None:
    ids = [f"job-{number}" for number in range(7)]
    for job_id in ids:
        store.add(job_id, job_config(), "")
    store.change("job-3", Change(JobState.CANCELLED))
    listed_ids: list[str] = []
    while page := store.page(limit=3, before_id=listed_ids[-1] if listed_ids else ""):
        listed_ids += [job.id for job in page]
    assert listed_ids == ids[::-1]
    cancelled_only = JobFilter(states=[JobState.CANCELLED])
    assert [job.id for job in store.page(limit=9, job_filter=cancelled_only)] == ["job-3"]


def test_the_newest_jobs_are_read_without_sorting_all(tmp_path: Path) -> None:
    statements: list[str] = []
    with open_database(tmp_path / "server.sqlite") as connection:
        connection.set_trace_callback(statements.append)
        store = JobStore(connection, on_change=lambda job_id: None)
        for order in (ListOrder(), ListOrder(reverse=False), ListOrder("name")):
            store.page(limit=3, order=order)
        connection.set_trace_callback(None)
        plans = [
            " ".join(row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"))
            for statement in statements
            if "ORDER BY" in statement
        ]
    assert ["TEMP B-TREE" in plan for plan in plans] == [False, False, True], plans


def test_queue_order(store: JobStore) -> None:
    """A retry keeps its place, a resumed job goes to the end."""
    for job_id in ("a", "b", "c"):
        store.add(job_id, job_config(), "")
    store.change("a", Change(JobState.PREPARING))
    store.queue_again("a", Attempt(2, retries=1), Change(JobState.QUEUED), at_end=False)
    assert [job.id for job in store.in_state(JobState.QUEUED)] == ["a", "b", "c"]
    store.change("a", Change(JobState.CANCELLED))
    store.queue_again("a", Attempt(3), Change(JobState.QUEUED), at_end=True)
    assert [job.id for job in store.in_state(JobState.QUEUED)] == ["b", "c", "a"]
    assert store.job("a").attempt == 3


def test_illegal_requeue_leaves_no_trace(store: JobStore) -> None:
    store.add("a", job_config(), "")
    longer_config = job_config(max_steps=99)
    with pytest.raises(WrongState):
        store.queue_again(
            "a", Attempt(2), Change(JobState.QUEUED), at_end=True, config=longer_config
        )
    job = store.job("a")
    assert (job.attempt, job.max_steps) == (1, 5)
    assert store.attempt(job) == Attempt(1)


def test_key_of_another_job(store: JobStore) -> None:
    job = store.add("a", job_config(), "key")
    assert store.find_submitted("key", job_config()) == job
    assert store.find_submitted("other", job_config()) is None
    with pytest.raises(InvalidInput) as exc_info:
        store.find_submitted("key", job_config("another"))
    assert exc_info.value.field == "idempotency_key"


def test_metrics_survive_and_count_as_seen(store: JobStore) -> None:
    store.add("a", job_config(), "")
    store.change("a", Change(step=3, metrics={"loss": 0.5}), Change(phase="saving"))
    job = store.job("a")
    assert (job.step, job.metrics, store.attempt(job).seen_step) == (3, {"loss": 0.5}, 3)
    first, step, saving = store.events("a", 0, 10)
    assert (first.metrics, step.metrics, saving.metrics) == ({}, {"loss": 0.5}, {})


def test_sqlite_is_as_assumed() -> None:
    assert sqlite3.sqlite_version_info >= (3, 37)
