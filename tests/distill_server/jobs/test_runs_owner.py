"""A directory of runs belongs to one job database."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from distill_server.jobs.database import back_up, open_database
from distill_server.jobs.runs_owner import own_runs
from protos.errors import WrongState


def own(runs: Path, database: Path, *, take_over: bool = False) -> ExitStack:
    """Open the database and own `runs`, until the stack that is returned closes."""
    with ExitStack() as stack:
        connection = stack.enter_context(open_database(database))
        stack.enter_context(own_runs(runs, database, connection, take_over=take_over))
        return stack.pop_all()
    raise AssertionError


def test_two_databases_of_one_directory(tmp_path: Path) -> None:
    runs, first, second = tmp_path / "runs", tmp_path / "first.sqlite", tmp_path / "second.sqlite"
    runs.mkdir()
    with own(runs, first), pytest.raises(WrongState, match="another server uses"):
        own(runs, second)
    with pytest.raises(
        WrongState, match=r"belongs to another job database .*first\.sqlite"
    ) as error:
        own(runs, second)
    assert error.value.field == "--runs"
    own(runs, first).close()


def test_the_owner_is_the_database_and_not_its_path(tmp_path: Path) -> None:
    runs, moved, copy = tmp_path / "runs", tmp_path / "moved.sqlite", tmp_path / "copy.sqlite"
    runs.mkdir()
    own(runs, runs / "server.sqlite").close()
    back_up(runs / "server.sqlite", copy)
    shutil.move(runs / "server.sqlite", moved)
    own(runs, moved).close()
    own(runs, copy).close()


def test_an_import_takes_the_runs_of_a_lost_database(tmp_path: Path) -> None:
    lost, new = tmp_path / "lost.sqlite", tmp_path / "new.sqlite"
    own(tmp_path, lost).close()
    with own(tmp_path, lost), pytest.raises(WrongState, match="another server uses"):
        own(tmp_path, new, take_over=True)
    own(tmp_path, new, take_over=True).close()
    own(tmp_path, new).close()
    with pytest.raises(WrongState, match="belongs to another job database"):
        own(tmp_path, lost)


def test_an_owner_that_cannot_be_read_is_another_one(tmp_path: Path) -> None:
    (tmp_path / ".server.json").write_text("{")
    with pytest.raises(WrongState, match="cannot be read"):
        own(tmp_path, tmp_path / "server.sqlite")
