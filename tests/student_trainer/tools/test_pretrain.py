"""`python -m student_trainer.tools.pretrain`: the files that it reads, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from student_trainer.tools.pretrain import main

RECORDS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_every_format_of_records_is_read(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "\n".join(map(json.dumps, RECORDS))
    data = tmp_path / f"data.{suffix}"
    data.write_text(json.dumps(RECORDS, indent=1) if suffix == "json" else f"{lines}\n\n")
    sizes = ["--tokenizer", "characters", "--layers", "1", "--width", "16", "--steps", "1"]
    main(["--data", str(data), *sizes, "--out", str(tmp_path / "model")])
    assert json.loads(capsys.readouterr().out)["vocabulary"] == 13
    assert (tmp_path / "model" / "model.safetensors").is_file()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    answer = tokenizer.parse_response("2<|end|>", prefix="user: 1+1=<|end|>assistant: ")
    assert answer == {"content": "2"}, "as transformers serve parses it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1",', "--data: PATH:1 is not JSON: "),
        ("", "--data: PATH has no records; "),
        ('{"prompt": "1"}', "--columns: column 'answer' of row 1 of PATH is not one of prompt; "),
        (
            '{"prompt": "1", "answer": [2]}',
            "--columns: column 'answer' of row 1 of PATH is not a text; name columns of texts",
        ),
    ],
)
def test_an_error_is_one_sentence(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["--data", str(data), "--out", str(tmp_path / "model")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message.replace('PATH', str(data))}")
