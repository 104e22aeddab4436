"""No answer is lost or stored twice, wherever a process is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from protos.errors import InvalidInput, WrongState
from student_trainer.exam import answer_store
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer

SETTINGS = {"model": "m", "temperature": 0.8}


def answer(number: int) -> StoredAnswer:
    return StoredAnswer(number // 4, number % 4, f"text {number}\n\u2028\U0001f600", number, False)


@contextmanager
def open_store(path: Path) -> Iterator[AnswerStore]:
    with AnswerStore(path, SETTINGS, rows_per_part=5) as store:
        yield store


def test_answers_come_back(tmp_path: Path) -> None:
    for first in range(0, 24, 8):  # three lives: a part and a half each
        with open_store(tmp_path) as store:
            for number in range(first, first + 8):
                assert (number // 4, number % 4) not in store
                store.add(answer(number))
                store.add(answer(number))  # added twice, stored once
    with open_store(tmp_path) as store:
        assert [store.get(n // 4, n % 4) for n in range(24)] == [answer(n) for n in range(24)]
        assert (6, 0) not in store
        store.write_part()
        assert (tmp_path / "journal.jsonl").read_bytes() == b""


@pytest.mark.parametrize("kept_bytes", range(0, 60, 7))
def test_half_a_line_is_no_answer(tmp_path: Path, kept_bytes: int) -> None:
    """A process is killed in the middle of a write, at any byte."""
    with open_store(tmp_path) as store:
        store.add(answer(0))
        store.add(answer(1))
    journal = tmp_path / "journal.jsonl"
    first = (json.dumps(asdict(answer(0))) + "\n").encode()
    journal.write_bytes(journal.read_bytes()[: len(first) + kept_bytes])
    for _ in range(2):  # the remaining lines are complete, also after reopening
        with open_store(tmp_path) as store:
            assert store.get(0, 0) == answer(0)
            assert (0, 1) not in store
    with open_store(tmp_path) as store:
        store.add(answer(1))
    with open_store(tmp_path) as store:
        assert (store.get(0, 0), store.get(0, 1)) == (answer(0), answer(1))


class Killed(BaseException):
    """Has the effect of kill -9 on the files."""


@pytest.mark.parametrize("when", ["before the part is there", "before the journal is empty"])
def test_kills_while_a_part_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    replace = os.replace

    def kill(fresh: Path, file: Path) -> None:
        if when == "before the journal is empty":
            replace(fresh, file)
        raise Killed

    with open_store(tmp_path) as store, monkeypatch.context() as patch:
        for number in range(4):
            store.add(answer(number))
        patch.setattr(answer_store.os, "replace", kill)
        with pytest.raises(Killed):
            store.add(answer(4))
    with open_store(tmp_path) as store:
        for number in range(4, 12):
            store.add(answer(number))
        assert [store.get(n // 4, n % 4) for n in range(12)] == [answer(n) for n in range(12)]
    with open_store(tmp_path) as store:
        assert [store.get(n // 4, n % 4) for n in range(12)] == [answer(n) for n in range(12)]
    rows = [row for part in tmp_path.glob("part-*.parquet") for row in read_part(part)]
    assert len(rows) == len({(row.prompt, row.sample) for row in rows})


def read_part(part: Path) -> list[StoredAnswer]:
    return [
        StoredAnswer(**row) for row in answer_store.pyarrow.parquet.read_table(part).to_pylist()
    ]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    message = r"holds answers for temperature = 0.8, not 1.0; use another directory"
    with pytest.raises(InvalidInput, match=message):
        AnswerStore(tmp_path, {**SETTINGS, "temperature": 1.0})


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(WrongState, match="another evaluation is writing"):
        open_store(tmp_path).__enter__()
    with open_store(tmp_path):
        pass
