"""The report on a pair of tokenizers, from two model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.plan.pair import pair_report, texts_in
from protos.errors import ExitCode, InvalidInput
from tests.clients.cross_tokenizer import trained

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def pair_directory(tmp_path: Path) -> Path:
    tokenizers = {"teacher": trained.byte_level(340), "student": trained.byte_fallback(340)}
    for name, tokenizer in tokenizers.items():
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 352}))
    records = [
        {"prompt": "the cat sat on the mat", "answer": "and the other cat"},
        {"prompt": "12 + 34 = 46", "answer": "46 - 12 = 34", "id": 3},
        {"messages": [{"role": "user", "content": "def add(one): return [one]"}]},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def arguments_of(pair_directory: Path) -> list[str]:
    teacher, student, data = (
        str(pair_directory / name) for name in ("teacher", "student", "data.jsonl")
    )
    return [teacher, student, "--data", data]


def test_shares_by_kind_of_text(pair_directory: Path) -> None:
    texts = texts_in(str(pair_directory / "data.jsonl"), [], 10)
    report = pair_report(pair_directory / "teacher", pair_directory / "student", texts)
    assert report.same is False
    assert "the tokenizers differ: id 0" in report.difference
    assert list(report.shares) == ["code", "maths", "prose", "all"]
    *shares_by_kind, total = report.shares.values()
    assert sum(share.tokens for share in shares_by_kind) == total.tokens
    assert sum(share.tokens * share.one_to_one for share in shares_by_kind) == pytest.approx(
        total.tokens * total.one_to_one
    )
    assert 0 < total.one_to_one < 1
    assert report.refusals == []
    assert [line.split()[0] for line in report.lines] == ["teacher.tokenizer", "data.tokenizer"]


def test_the_command(pair_directory: Path, capsys: Capture) -> None:
    arguments = arguments_of(pair_directory)
    assert main(["pair", *arguments]) == ExitCode.OK
    output = capsys.readouterr().out
    assert "tokenizer: another one" in output
    assert 'teacher.tokenizer = "auto"' in output
    assert main(["--json", "pair", *arguments, "--column", "answer"]) == ExitCode.OK
    record = json.loads(capsys.readouterr().out)
    assert record["same"] is False
    assert record["shares"]["maths"]["texts"] == 1
    assert main(["pair", *arguments, "--column", "nothing"]) == ExitCode.USAGE
    assert "no column nothing with text" in capsys.readouterr().err


def test_one_tokenizer(pair_directory: Path, capsys: Capture) -> None:
    report = pair_report(pair_directory / "teacher", pair_directory / "teacher", [])
    assert report.same
    assert report.loss.endswith("over 352 ids")
    (pair_directory / "student" / "tokenizer.json").write_bytes(
        (pair_directory / "teacher" / "tokenizer.json").read_bytes()
    )
    vocabulary = json.loads((pair_directory / "teacher" / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    width = len(vocabulary) - 1
    (pair_directory / "student" / "config.json").write_text(json.dumps({"vocab_size": width}))
    report = pair_report(pair_directory / "teacher", pair_directory / "student", [])
    assert f"id {width} is the token" in report.refusals[0]
    arguments = arguments_of(pair_directory)
    assert main(["pair", *arguments]) == ExitCode.JOB_FAILED
    assert f"the student has logits for {width} ids" in capsys.readouterr().out


def test_what_cannot_be_aligned(pair_directory: Path) -> None:
    document = json.loads((pair_directory / "teacher" / "tokenizer.json").read_text())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (pair_directory / "teacher" / "tokenizer.json").write_text(json.dumps(document))
    report = pair_report(pair_directory / "teacher", pair_directory / "student", ["a text"])
    assert "its decoder is WordPiece" in report.refusals[0]
    (pair_directory / "teacher" / "tokenizer.json").write_text("{")
    report = pair_report(pair_directory / "teacher", pair_directory / "student", ["a text"])
    assert "of the teacher cannot be read" in report.refusals[0]


def test_data_without_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(InvalidInput, match="no column with text"):
        texts_in(str(path), [], 10)


def test_the_text_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n")
    assert texts_in(str(path), [], 10) == ["What is it?"]


def test_other_special_tokens(pair_directory: Path, capsys: Capture) -> None:
    """The report lists the roles of special tokens, and text tokens without a role."""
    document = json.loads((pair_directory / "teacher" / "tokenizer.json").read_text())
    size = len(document["model"]["vocab"])

    def save_tokenizer(name: str, *added_tokens: tuple[str, bool]) -> None:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokens = [
            {"id": size + number, "content": content, "special": special, **flags}
            for number, (content, special) in enumerate(added_tokens)
        ]
        changed_document = document | {"added_tokens": [*document["added_tokens"], *tokens]}
        (pair_directory / name / "tokenizer.json").write_text(json.dumps(changed_document))
        config = {"eos_token": added_tokens[0][0]}
        (pair_directory / name / "tokenizer_config.json").write_text(json.dumps(config))
        (pair_directory / name / "config.json").write_text(json.dumps({"vocab_size": size + 8}))

    save_tokenizer("student", ("<im_end>", True), ("<box>", True))
    save_tokenizer("teacher", ("<end>", True), ("<User>", True))
    arguments = arguments_of(pair_directory)
    assert main(["pair", *arguments]) == ExitCode.OK
    output = capsys.readouterr().out
    assert "role: <im_end> of the student is <end> of the teacher" in output
    assert f"KL of the rows of every token (docs/methods.md), over {size + 8} ids" in output
    assert 'teacher.tokenizer = "auto"' in output
    save_tokenizer("teacher", ("<end>", True), ("<think>", False))
    report = pair_report(pair_directory / "teacher", pair_directory / "student", ["the cat"])
    assert report.missing == ("<think>",)
    assert report.shares
    assert report.lines[-1].startswith('teacher.roles = { "TOKEN" = "<think>" }')
