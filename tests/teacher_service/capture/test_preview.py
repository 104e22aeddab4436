"""The preview of a capture: the sequences of its reader, with what the teacher reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from clients.data.preview import Preview
from protos.errors import InvalidInput
from teacher_service.capture.preview import preview_of
from tests.teacher_service.capture.material import job, write_lines


def views(preview: Preview, record: int = 0) -> list[tuple[str, list[str], list[str]]]:
    return [
        (
            view.reader,
            [text for run in view.runs if run.kind == "context" for text in run.texts],
            [text for run in view.runs if run.kind != "context" for text in run.texts],
        )
        for view in preview.records[record].views
    ]


def test_completions_with_a_context_of_the_teacher(words: Path, tmp_path: Path) -> None:
    records = [
        {"prompt": "t5 t6", "answer": "t7"},
        {"prompt": "t5", "answer": ""},
        {"prompt": "t5 " * 70, "answer": "t7"},
    ]
    path = write_lines(tmp_path / "a.jsonl", records)
    config = job(path, words, teacher__context="{answer} t9 ", method__max_tokens=64)
    preview = preview_of(config, AutoTokenizer.from_pretrained(words))
    assert views(preview) == [
        ("student", ["t5", "t6"], ["t7", "t0"]),
        ("teacher", ["t7", "t9", "t5", "t6"], ["t7", "t0"]),
    ]
    assert [record.problem for record in preview.records[1:]] == [
        "left out: with nothing to score",
        "left out: too long",
    ]
    assert "2 of 3 records (67%) are left out, so the job will fail" in preview.warnings[0]


def test_packed_text_has_no_missing_ends(words: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "t1 t2 t3"}, {"text": "t4 t5"}])
    config = job(path, words, data__form="text", method__max_tokens=4)
    preview = preview_of(config, AutoTokenizer.from_pretrained(words))
    assert views(preview) == [("student", ["t1"], ["t2", "t3", "t0"])]
    assert views(preview, 1) == [("student", ["t4"], ["t5", "t0"])]
    assert preview.warnings == ()


def test_a_template_that_does_not_fit_is_refused(words: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": []}])
    config = job(path, words, data__form="messages")
    with pytest.raises(InvalidInput, match="no chat template"):
        preview_of(config, AutoTokenizer.from_pretrained(words))
