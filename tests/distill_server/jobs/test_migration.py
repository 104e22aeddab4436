"""A database of the first released server is migrated to the current schema."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.jobs.job import JobState
from distill_server.jobs import database
from distill_server.jobs.database import open_database
from distill_server.jobs.store import Attempt, Change, JobStore
from distill_server.runners.machine import Share
from protos.errors import InvalidInput, Unavailable
from tests.distill_server.conftest import job_config

# The exact schema of the first server; the program's copy must not drift from it.
FIRST_SCHEMA = (Path(__file__).parent / "schema-1.sql").read_text()


@pytest.fixture
def old_database(tmp_path: Path) -> Path:
    """A database with a queued and a running job."""
    path = tmp_path / "server.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(FIRST_SCHEMA)
    config = json.loads(job_config().model_dump_json())
    del config["resources"], config["priority"]
    for number, state in enumerate(["QUEUED", "RUNNING"], start=1):
        connection.execute(
            "INSERT INTO jobs VALUES (?, ?, 'n', 'on_policy', ?, ?, '', '', 1, 3, 5, '{}',"
            " 10.0, 11.0, 0.0, 1, ?)",
            (number, f"job-{number}", json.dumps(config), state, number),
        )
        connection.execute("INSERT INTO attempts VALUES (?, 1, 0, NULL, 3)", (f"job-{number}",))
        connection.execute(
            "INSERT INTO events VALUES (?, 1, 10.0, ?, '', '', 1, 3, 5, '{}')",
            (f"job-{number}", state),
        )
        connection.execute(
            "INSERT INTO submissions VALUES (?, ?, 'x')", (f"key {number}", f"job-{number}")
        )
    connection.commit()
    connection.close()
    return path


def read_jobs(connection: sqlite3.Connection) -> tuple[object, ...]:
    store = JobStore(connection, on_change=lambda job_id: None)
    jobs = store.page(limit=9)
    return jobs, [store.attempt(job) for job in jobs], [store.events(j.id, 0, 9) for j in jobs]


def test_jobs_attempts_and_events_are_all_there(old_database: Path) -> None:
    with open_database(old_database) as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        assert [job.id for job in store.page(limit=9)] == ["job-2", "job-1"]
        assert store.attempt(store.job("job-2")) == Attempt(1, seen_step=3)
        assert [event.seq for event in store.events("job-1", 0, 9)] == [1]
        assert store.held_shares() == [Share(0)]  # the running job has its slot
        store.begin_attempt(store.job("job-1"), Share(2, ("0",)), Change(JobState.PREPARING))
        store.add("job-3", job_config().model_copy(update={"priority": 9}), "")
        jobs_before = read_jobs(connection)
        schema = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    with open_database(old_database) as connection:
        assert read_jobs(connection) == jobs_before
    with open_database(old_database.with_name("new.sqlite")) as connection:
        new_schema = connection.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
        assert [tuple(row) for row in schema] == [tuple(row) for row in new_schema]


def test_a_key_of_before_the_upgrade_is_the_same_job(old_database: Path) -> None:
    """The first server hashed all configuration keys of its time; now there are more keys."""
    values = json.loads(job_config().model_dump_json())
    del values["resources"], values["priority"]
    digest = hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest()
    with sqlite3.connect(old_database) as connection:
        connection.execute("UPDATE submissions SET config_sha256 = ?", (digest,))
    connection.close()
    with open_database(old_database) as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        for number in (1, 2):
            job = store.find_submitted(f"key {number}", job_config())
            assert job is not None
            assert job.id == f"job-{number}"
        changes = ({"name": "x"}, {"priority": 1}, {"max_steps": 6}, {"seed": 1})
        for change in changes:
            with pytest.raises(InvalidInput, match="another job, job-1"):
                store.find_submitted("key 1", job_config().model_copy(update=change))


def test_a_key_of_today_outlives_new_keys_and_a_resume(old_database: Path) -> None:
    """The next server has one more key, and the job was resumed with more steps."""

    class Next(OnPolicyJob):
        """The job of a later version."""

        surprise: int = 7

    with open_database(old_database) as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        store.add("job-3", job_config(), "key 3")
        for state in (JobState.PREPARING, JobState.RUNNING, JobState.SUCCEEDED):
            store.change("job-3", Change(state))
        longer = job_config(max_steps=50)
        store.queue_again("job-3", Attempt(2), Change(JobState.QUEUED), at_end=True, config=longer)
        values = json.loads(job_config().model_dump_json())
        for config in (job_config(), Next.model_validate(values)):
            job = store.find_submitted("key 3", config)
            assert job is not None
            assert (job.id, job.max_steps) == ("job-3", 50)
        with pytest.raises(InvalidInput, match="another job, job-3"):
            store.find_submitted("key 3", Next.model_validate({**values, "surprise": 8}))


def test_a_step_that_fails_leaves_the_old_one(
    old_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_steps = (*database._STEPS[:1], database._STEPS[1] + "ALTER TABLE nothing ADD COLUMN x;")
    with monkeypatch.context() as patched:
        patched.setattr(database, "_STEPS", broken_steps)
        with pytest.raises(Unavailable, match="schema version 2"), open_database(old_database):
            pass
    with open_database(old_database) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(database._STEPS)
        assert len(JobStore(connection, on_change=lambda job_id: None).page(limit=9)) == 2
