"""The examples of docs/python.md run against a real teacher."""

from __future__ import annotations

import pytest

from tests.documents import blocks
from tests.teacher_service.conftest import StartTeacher


def test_the_rows_of_the_documentation(
    start_teacher: StartTeacher, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = start_teacher("--engine", "fake", "--model", "vocab=64")
    (block,) = blocks("docs/python.md", "rows")
    assert block.body.count("localhost:50052") == 1
    exec(block.body.replace("localhost:50052", teacher.address), {})
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.strip("[]").split()) for line in lines] == [3, 2]


def test_the_rows_in_an_event_loop(
    start_teacher: StartTeacher, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = start_teacher("--engine", "fake", "--model", "vocab=64")
    (block,) = blocks("docs/python.md", "rows-async")
    assert block.body.count("localhost:50052") == 1
    exec(block.body.replace("localhost:50052", teacher.address), {})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [len(line.partition("[")[2].strip("]").split()) for line in lines] == [2, 1]
