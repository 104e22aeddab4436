"""All 49 pairs of states through `JobStore.change`."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.jobs.job import TERMINAL, TRANSITIONS, JobState
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Change, JobStore
from protos.errors import WrongState
from tests.distill_server.conftest import job_config


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with open_database(tmp_path / "server.sqlite") as connection:
        yield connection


@pytest.mark.parametrize(("old", "new"), list(itertools.product(JobState, JobState)))
def test_pair(connection: sqlite3.Connection, old: JobState, new: JobState) -> None:
    rung: list[str] = []
    store = JobStore(connection, on_change=rung.append)
    store.add("a", job_config(), "")
    connection.execute("UPDATE jobs SET state = ?", (old,))
    if (old, new) in TRANSITIONS:
        job = store.change("a", Change(new, reason="because"))
        assert (job.state, job.last_seq) == (new, 2)
        assert (job.ended_at > 0) == (new in TERMINAL)
        assert [e.state for e in store.events("a", 0, 10)] == [JobState.QUEUED, new]
    else:
        with pytest.raises(WrongState, match=f"{old} and cannot become {new}"):
            store.change("a", Change(phase="never seen"), Change(new))
        assert store.job("a").state is old
        assert store.job("a").last_seq == 1
        assert len(store.events("a", 0, 10)) == 1


def test_terminal_states_only_lead_back_to_the_queue() -> None:
    assert {new for old, new in TRANSITIONS if old in TERMINAL} == {JobState.QUEUED}
