"""Submit, cancel and resume on the store: full disks, missing files and invalid input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from clients.config.kinds import AnyJob
from clients.jobs.job import JobState
from clients.runs.directory import Control, RunDirectory
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.new_runs import settle_new_runs, unnamed_run
from distill_server.jobs.store import Change, JobStore
from distill_server.rpc.encode import decode_state
from distill_server.runners.interface import Exited
from distill_server.runners.machine import Machine, Share
from distill_server.scheduler import Policy
from protos.errors import InvalidInput, NotFound, Unavailable
from tests.distill_server.conftest import job_config
from tests.distill_server.scripted_runner import small_server


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with open_database(tmp_path / "server.sqlite") as connection:
        yield connection


@pytest.fixture
def control(tmp_path: Path, connection: sqlite3.Connection) -> JobControl:
    (tmp_path / "runs").mkdir()
    store = JobStore(connection, on_change=lambda job_id: None)
    return JobControl(store, tmp_path / "runs", wake=lambda: None)


def submit(control: JobControl, **change: object) -> str:
    config = job_config().model_dump() | change
    return control.submit(json.dumps(config), "", "").id


def test_full_database_acknowledges_nothing_and_leaves_nothing(
    tmp_path: Path, connection: sqlite3.Connection, control: JobControl
) -> None:
    submit(control, name="x")
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    stored = 1
    with contextlib.suppress(Unavailable):
        while stored < 1000:
            submit(control, name="x" * 200)
            stored += 1
    assert stored < 1000
    assert len(list((tmp_path / "runs").iterdir())) == stored
    assert connection.execute("SELECT count(*) FROM jobs").fetchone()[0] == stored
    with pytest.raises(Unavailable, match="full"):
        submit(control, name="x" * 200)
    assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_directory_that_cannot_be_made_is_unavailable(
    tmp_path: Path, connection: sqlite3.Connection, control: JobControl
) -> None:
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").touch()
    with pytest.raises(Unavailable, match="cannot write the job"):
        submit(control)
    assert connection.execute("SELECT count(*) FROM jobs").fetchone()[0] == 0


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Qwen3-0.6B from 4B", "qwen3-0.6b-from-4b"),
        ("../../etc/passwd", "etc-passwd"),
        ("\x00\n\u4f60\u597d", "0f7256"),
        ("x" * 200, "x" * 40),
        ("...", "ab5df6"),
    ],
)
def test_ids_are_safe_names(tmp_path: Path, control: JobControl, name: str, slug: str) -> None:
    job_id = submit(control, name=name)
    assert job_id.rsplit("-", 1)[0] == f"on-policy-{slug}"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [job_id]


def test_id_that_is_taken_is_not_given_again(
    tmp_path: Path, control: JobControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "ab" * count)
    assert submit(control) == "on-policy-test-abab"
    assert submit(control) == "on-policy-test-abababab"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00", "{}" * 2, "9" * 5000])
def test_nonsense_is_invalid_input(control: JobControl, text: str) -> None:
    with pytest.raises(InvalidInput) as exc_info:
        control.submit(text, "", "")
    assert exc_info.value.field


@pytest.mark.parametrize(
    ("change", "field"),
    [({"max_steps": 2**31}, "max_steps"), ({"name": "x" * 201}, "name"), ({"name": ""}, "name")],
)
def test_values_that_would_not_fit(
    control: JobControl, change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInput) as exc_info:
        submit(control, **change)
    assert exc_info.value.field == field


def test_all_problems_are_told(control: JobControl) -> None:
    with pytest.raises(InvalidInput, match=r"seed: .*; surprise: Extra"):
        submit(control, max_steps=0, seed=-1, surprise=1)


def test_author_s_file_keeps_its_kind(tmp_path: Path, control: JobControl) -> None:
    config = job_config().model_dump_json()
    toml = control.submit(config, 'name = "a"\n', "").id
    yaml = control.submit(config, "name: a\n", "").id
    assert (tmp_path / "runs" / toml / "job.toml").exists()
    assert (tmp_path / "runs" / yaml / "job.yaml").exists()


@pytest.mark.parametrize("length", [{"max_steps": 50}, {"max_steps": 0, "epochs": 2.0}])
def test_resume_checks_max_steps(
    control: JobControl, connection: sqlite3.Connection, length: Mapping[str, float]
) -> None:
    job_id = submit(control, **length)
    asyncio.run(control.cancel(job_id, now=False))
    connection.execute("UPDATE jobs SET step = 20")
    for steps in (20, 2**31, 2**63):
        with pytest.raises(InvalidInput) as exc_info:
            control.resume(job_id, max_steps=steps, from_step=0)
        assert exc_info.value.field == "max_steps"
    job = control.resume(job_id, max_steps=21, from_step=0)
    assert (job.state, job.max_steps, job.attempt) == (JobState.QUEUED, 21, 2)
    config = json.loads(job.config_json)
    assert (config["max_steps"], config["epochs"]) == (21, None)


@pytest.mark.parametrize("nonsense", ["", "{", "[]", '{"stop": "later"}', '{"start": 1}'])
def test_wishes_that_cannot_be_read(
    control: JobControl, connection: sqlite3.Connection, tmp_path: Path, nonsense: str
) -> None:
    job_id = submit(control)
    connection.execute("UPDATE jobs SET state = 'RUNNING'")
    run = RunDirectory(tmp_path / "runs" / job_id)
    (run.path / "control.json").write_text(nonsense)
    assert run.read_control() == Control()
    assert asyncio.run(control.cancel(job_id, now=False)).state is JobState.CANCELLING
    assert run.read_control() == Control("checkpoint", cancelled_attempt=1)


def test_files_that_are_gone(
    control: JobControl, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    job_id = submit(control)
    connection.execute("UPDATE jobs SET state = 'RUNNING'")
    shutil.rmtree(tmp_path / "runs" / job_id)
    assert asyncio.run(control.cancel(job_id, now=False)).state is JobState.CANCELLING
    connection.execute("UPDATE jobs SET state = 'FAILED'")
    with pytest.raises(
        NotFound, match=f"the run directory of job {job_id} was removed"
    ) as exc_info:
        control.resume(job_id, max_steps=0, from_step=0)
    assert str(tmp_path) not in str(exc_info.value)
    assert exc_info.value.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("# why\n\nmax_steps = 1\n", "job.toml"),
        ("[student]\n", "job.toml"),
        ("max_steps: 1\n", "job.yaml"),
        ("a: b=c\n", "job.yaml"),
        # Minutes of parsing, a RecursionError, and an integer that Python refuses.
        (".".join("a" * 100_000) + " = 1", "job.toml"),
        ("a = " + "[" * 100_000, "job.toml"),
        ("a = " + "9" * 5_000, "job.toml"),
    ],
)
def test_the_author_s_text_is_kept_and_not_parsed(
    control: JobControl, tmp_path: Path, text: str, name: str
) -> None:
    job = control.submit(job_config().model_dump_json(), text, "")
    assert (tmp_path / "runs" / job.id / name).read_text() == text


def test_texts_are_bounded(control: JobControl) -> None:
    with pytest.raises(InvalidInput, match="config_text"):
        control.submit(job_config().model_dump_json(), "#" * 300_000, "")
    with pytest.raises(InvalidInput, match="config_json"):
        submit(control, name="n" * 300_000)


def test_a_state_that_is_none() -> None:
    with pytest.raises(InvalidInput, match="no job state with number 99"):
        decode_state(99)  # type: ignore[arg-type]


def test_a_running_job_is_cancelled_on_a_full_disk(
    tmp_path: Path, connection: sqlite3.Connection
) -> None:
    """The request reaches the trainer; the state is stored when the disk has space again."""
    (tmp_path / "runs").mkdir()
    store = JobStore(connection, on_change=lambda job_id: None)
    stopped: list[int] = []
    control = JobControl(
        store,
        tmp_path / "runs",
        wake=lambda: None,
        stop_trainer=lambda run, attempt: stopped.append(attempt),
    )
    job_id = submit(control)
    store.change(job_id, Change(JobState.PREPARING), Change(JobState.RUNNING))
    connection.execute("PRAGMA query_only = ON")  # as on a full disk
    assert asyncio.run(control.cancel(job_id, now=False)).state is JobState.CANCELLING
    run = RunDirectory(tmp_path / "runs" / job_id)
    assert run.read_control() == Control("checkpoint", cancelled_attempt=1)
    assert store.job(job_id).state is JobState.RUNNING
    with pytest.raises(Unavailable):
        control.store_late_cancels()
    connection.execute("PRAGMA query_only = OFF")
    control.store_late_cancels()
    assert store.job(job_id).state is JobState.CANCELLING
    control.store_late_cancels()
    assert store.events(job_id, 0, 100)[-1].state is JobState.CANCELLING


def test_a_cancel_on_a_full_disk_outlives_the_server(tmp_path: Path) -> None:
    """Also if the trainer has ended when the next server starts; a resumed job is not cancelled."""
    with small_server(tmp_path, Policy(Machine(slots=2))) as server:
        running, ended = (server.submit_checked(job_config(name)).id for name in ("a", "b"))
        server.look()
        for job_id in (running, ended):
            server.store.change(job_id, Change(JobState.RUNNING))
        server.store._db.execute("PRAGMA query_only = ON")  # as on a full disk
        for job_id in (running, ended):
            assert server.cancel(job_id, now=False).state is JobState.CANCELLING
        server.close()
        server.runner.say(tmp_path, ended, "cancelled")
        server.runner.end(ended, Exited(0))
        server.start()
        server.look()
        assert server.store.job(running).state is JobState.CANCELLING
        assert server.store.job(ended).state is JobState.CANCELLED
        server.control.resume(ended, max_steps=0, from_step=0)
        # The server dies before the new attempt has its files.
        server.store.begin_attempt(
            server.store.job(ended), Share(1), Change(JobState.PREPARING), teacher=""
        )
        server.close()
        server.start()
        server.look()
        assert server.store.job(ended).state is JobState.QUEUED


def test_directories_that_a_killed_server_has_left(
    tmp_path: Path, connection: sqlite3.Connection, control: JobControl
) -> None:
    runs = tmp_path / "runs"
    stored = submit(control)
    (runs / stored).rename(unnamed_run(runs, stored))  # killed before the rename
    unnamed_run(runs, "never-stored").mkdir()
    (runs / "of-a-user").mkdir()
    settle_new_runs(JobStore(connection, on_change=lambda job_id: None), runs)
    assert {path.name for path in runs.iterdir()} == {stored, "of-a-user"}
    assert RunDirectory(runs / stored).config().max_steps == 5


def test_a_later_stage_is_checked_with_the_model_of_the_first(tmp_path: Path) -> None:
    """Before, its faults were found when the first stages had ended."""
    checked: list[str] = []

    async def check(config: AnyJob, run: Path) -> None:
        assert config.trained_student is not None
        checked.append(config.trained_student.model)
        if config.name == "third":
            raise InvalidInput("is too large", field="method.top_k")

    async def check_all(control: JobControl, *configs: dict[str, object]) -> None:
        await control.check(*(json.dumps(config) for config in configs))

    def stage(name: str, model: str) -> dict[str, object]:
        return job_config(name).model_dump() | {"student": {"model": model}}

    with open_database(tmp_path / "server.sqlite") as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        control = JobControl(store, tmp_path, wake=lambda: None, preflight=check)
        stages = [stage("first", "tiny"), stage("second", "@first/export")]
        asyncio.run(check_all(control, *stages))
        assert checked == ["tiny", "tiny"]
        with pytest.raises(InvalidInput, match="job 'third': is too large"):
            asyncio.run(check_all(control, *stages, stage("third", "@second/export")))
        job_id = control.submit(json.dumps(stage("earlier", "small")), "", "").id
        checked.clear()
        asyncio.run(check_all(control, stage("later", f"@{job_id}/export")))
        assert checked == ["small"]
