"""The report of a pair, from two directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.preflight.pair import pair_report, texts_in
from protos.errors import ExitCode, InvalidInput
from tests.clients.alignment import trained

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = {"teacher": trained.byte_level(340), "student": trained.byte_fallback(340)}
    for name, tokenizer in made.items():
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 352}))
    records = [
        {"prompt": "the cat sat on the mat", "answer": "and the other cat"},
        {"prompt": "12 + 34 = 46", "answer": "46 - 12 = 34", "id": 3},
        {"messages": [{"role": "user", "content": "def add(one): return [one]"}]},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return tmp_path


def test_shares_by_kind_of_text(root: Path) -> None:
    texts = texts_in(str(root / "data.jsonl"), [], 10)
    found = pair_report(root / "teacher", root / "student", texts)
    assert found.same is False
    assert "the tokenizers differ: id 0" in found.difference
    assert list(found.shares) == ["code", "maths", "prose", "all"]
    *parts, whole = found.shares.values()
    assert sum(one.tokens for one in parts) == whole.tokens
    assert sum(one.tokens * one.one_to_one for one in parts) == pytest.approx(
        whole.tokens * whole.one_to_one
    )
    assert 0 < whole.one_to_one < 1
    assert found.refusals == []
    assert [line.split()[0] for line in found.lines] == ["teacher.tokenizer", "data.tokenizer"]


def test_the_command(root: Path, capsys: Capture) -> None:
    arguments = [str(root / "teacher"), str(root / "student"), "--data", str(root / "data.jsonl")]
    assert main(["pair", *arguments]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "tokenizer: another one" in printed
    assert 'teacher.tokenizer = "auto"' in printed
    assert main(["--json", "pair", *arguments, "--column", "answer"]) == ExitCode.OK
    record = json.loads(capsys.readouterr().out)
    assert record["same"] is False
    assert record["shares"]["maths"]["texts"] == 1
    assert main(["pair", *arguments, "--column", "nothing"]) == ExitCode.USAGE
    assert "no column nothing with text" in capsys.readouterr().err


def test_one_tokenizer(root: Path, capsys: Capture) -> None:
    found = pair_report(root / "teacher", root / "teacher", [])
    assert found.same
    assert found.loss.endswith("over 352 ids")
    (root / "student" / "tokenizer.json").write_bytes(
        (root / "teacher" / "tokenizer.json").read_bytes()
    )
    last = json.loads((root / "teacher" / "tokenizer.json").read_text())["model"]["vocab"]
    width = len(last) - 1
    (root / "student" / "config.json").write_text(json.dumps({"vocab_size": width}))
    found = pair_report(root / "teacher", root / "student", [])
    assert f"id {width} is the token" in found.refusals[0]
    arguments = [str(root / "teacher"), str(root / "student"), "--data", str(root / "data.jsonl")]
    assert main(["pair", *arguments]) == ExitCode.JOB_FAILED
    assert f"the student has logits for {width} ids" in capsys.readouterr().out


def test_what_cannot_be_aligned(root: Path) -> None:
    document = json.loads((root / "teacher" / "tokenizer.json").read_text())
    document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (root / "teacher" / "tokenizer.json").write_text(json.dumps(document))
    found = pair_report(root / "teacher", root / "student", ["a text"])
    assert "its decoder is WordPiece" in found.refusals[0]
    (root / "teacher" / "tokenizer.json").write_text("{")
    found = pair_report(root / "teacher", root / "student", ["a text"])
    assert "of the teacher cannot be read" in found.refusals[0]


def test_data_without_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(InvalidInput, match="no column with text"):
        texts_in(str(path), [], 10)


def test_other_special_tokens(root: Path, capsys: Capture) -> None:
    """Their roles, or the tokens of text that have none."""
    document = json.loads((root / "teacher" / "tokenizer.json").read_text())
    size = len(document["model"]["vocab"])

    def save(name: str, *added: tuple[str, bool]) -> None:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokens = [
            {"id": size + number, "content": content, "special": special, **plain}
            for number, (content, special) in enumerate(added)
        ]
        made = document | {"added_tokens": [*document["added_tokens"], *tokens]}
        (root / name / "tokenizer.json").write_text(json.dumps(made))
        config = {"eos_token": added[0][0]}
        (root / name / "tokenizer_config.json").write_text(json.dumps(config))
        (root / name / "config.json").write_text(json.dumps({"vocab_size": size + 8}))

    save("student", ("<im_end>", True), ("<box>", True))
    save("teacher", ("<end>", True), ("<User>", True))
    arguments = [str(root / "teacher"), str(root / "student"), "--data", str(root / "data.jsonl")]
    assert main(["pair", *arguments]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "role: <im_end> of the student is <end> of the teacher" in printed
    assert f"KL of the rows of every token (docs/methods.md), over {size + 8} ids" in printed
    assert 'teacher.tokenizer = "auto"' in printed
    save("teacher", ("<end>", True), ("<think>", False))
    found = pair_report(root / "teacher", root / "student", ["the cat"])
    assert found.missing == ("<think>",)
    assert found.shares
    assert found.lines[-1].startswith('teacher.roles = { "TOKEN" = "<think>" }')
