"""No answer is lost or stored twice, wherever a process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import InvalidInput, WrongState
from student_trainer.exam.answer_store import AnswerStore, StoredAnswer

SETTINGS = {"model": "m", "temperature": 0.8}


def answer(number: int) -> StoredAnswer:
    return StoredAnswer(number // 4, number % 4, f"text {number}\n\u2028\U0001f600", number, False)


def open_store(path: Path) -> AnswerStore:
    return AnswerStore(path, SETTINGS)


def test_answers_come_back(tmp_path: Path) -> None:
    for first in range(0, 24, 8):
        with open_store(tmp_path) as store:
            for number in range(first, first + 8, 2):
                assert store.get(number // 4, number % 4) is None
                store.add(answer(number), answer(number + 1))
    with open_store(tmp_path) as store:
        assert [store.get(n // 4, n % 4) for n in range(24)] == [answer(n) for n in range(24)]
        assert store.get(6, 0) is None


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("line", range(3))
def test_half_a_line_is_no_answer(tmp_path: Path, line: int, share: float) -> None:
    """A process is killed in the middle of a write: of the settings or of answers."""
    with open_store(tmp_path) as store:
        store.add(answer(0))
        store.add(answer(1))
    file = tmp_path / "answers.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    end = int(share * (len(lines[line]) - 1))  # without the end of the line
    file.write_bytes(b"".join(lines[:line]) + lines[line][:end])
    answers = [answer(0), answer(1)][: max(0, line - 1)]
    for _ in range(2):  # the remaining lines are complete, also after reopening
        with open_store(tmp_path) as store:
            assert [store.get(0, n) for n in range(len(answers))] == answers
            assert store.get(0, len(answers)) is None
    with open_store(tmp_path) as store:
        store.add(answer(1))
    with open_store(tmp_path) as store:
        assert store.get(0, 1) == answer(1)
        assert store.get(0, 0) == (answer(0) if answers else None)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    message = r"holds answers for temperature = 0.8, not 1.0; use another directory"
    with pytest.raises(InvalidInput, match=message):
        AnswerStore(tmp_path, {**SETTINGS, "temperature": 1.0})


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(WrongState, match="another evaluation is writing"):
        open_store(tmp_path)
    with open_store(tmp_path):
        pass
