"""`python -m student_trainer.tools.pretrain`: the files that it reads, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def test_conversations_are_written_by_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, template = tmp_path / "chats.jsonl", tmp_path / "chat.jinja"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    options = ["--columns", "messages", "--chat-template", str(template), "--batch", "1"]
    sizes = ["--tokenizer", "characters", "--layers", "1", "--width", "32", "--steps", "60"]
    main(["--data", str(data), *options, *sizes, "--out", str(tmp_path / "model")])
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocabulary"] == len({*"ua: 1+=2"}) + 1, "<|end|> is one token"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        turns[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0]
    assert tokenizer.decode(answer) == "u: 1+1=<|end|>a: 2<|end|>"


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


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "cannot read TEMPLATE: [Errno 2] No such file"),
        ("{% for", "the chat template cannot write row 1 of "),
        ("{{ raise_exception('no system') }}", "the chat template cannot write row 1 of "),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(
    template: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "chats.jsonl", tmp_path / "chat.jinja"
    data.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    if template is not None:
        file.write_text(template)
    options = ["--columns", "messages", "--chat-template", str(file)]
    with pytest.raises(SystemExit) as stop:
        main(["--data", str(data), *options, "--out", str(tmp_path / "model")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --chat-template: {message.replace('TEMPLATE', str(file))}")
