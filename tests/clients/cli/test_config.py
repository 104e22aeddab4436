"""`distill config check` of the files and models that a job names on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from protos.errors import ExitCode

CHAT = '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n'


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a student without a chat template and a file of conversations."""
    monkeypatch.chdir(tmp_path)
    Path("student").mkdir()
    Path("student/config.json").write_text("{}")
    Path("student/model.safetensors").touch()
    Path("student/tokenizer.json").touch()
    Path("student/tokenizer_config.json").write_text(json.dumps({"chat_template": None}))
    Path("chats.jsonl").write_text(CHAT)
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def check(text: str) -> int:
    Path("job.toml").write_text(f'method.type = "sft"\nstudent.model = "student"\n{text}')
    return main(["config", "check", "job.toml"])


def test_a_file_that_is_not_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert check('data.path = "chat.jsonl"\n') == ExitCode.OK
    output, notes = capsys.readouterr()
    assert output == "job.toml: ok, but not checked: chat.jsonl\n"
    assert "data.path: chat.jsonl is not on this machine; did you mean chats.jsonl?" in notes


def test_a_directory_that_is_not_here_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Its parent directory exists, so the name is no hub id."""
    Path("models").mkdir()
    Path("models/small").mkdir()
    job = 'method.type = "sft"\nstudent.model = "models/smal"\ndata.path = "chats.jsonl"\n'
    Path("job.toml").write_text(job)
    assert main(["config", "check", "job.toml"]) == ExitCode.OK
    note = "student.model: models/smal is not on this machine; did you mean models/small?"
    assert note in capsys.readouterr().err
    assert main(["run", "job.toml"]) == ExitCode.USAGE
    error = "error: student.model: no such file: models/smal; did you mean models/small?\n"
    assert capsys.readouterr().err.endswith(error)


def test_a_hub_id_that_is_like_a_directory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A job with such a name would wait for a hub that does not answer."""
    for model, suggestion in (("studnt", "student"), ("gpt2", ""), ("own/studnt", "")):
        job = f'method.type = "sft"\nstudent.model = "{model}"\ndata.path = "chats.jsonl"\n'
        Path("job.toml").write_text(job)
        note = f"student.model: {model} is not on this machine: taken as a hub id; did you mean"
        for arguments in (["config", "check", "job.toml"], ["submit", "job.toml"]):
            expected = ExitCode.OK if arguments[0] == "config" else ExitCode.UNREACHABLE
            assert main(["--server", "localhost:1", *arguments]) == expected
            notes = [line for line in capsys.readouterr().err.splitlines() if "hub id" in line]
            assert notes == [f"{note} {suggestion}?"] * bool(suggestion)


def test_a_capture_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, it failed at its start."""
    job = 'method.type = "capture"\ndata.path = "chats.jsonl"\n'
    for keys, code in (
        ('teacher.address = "localhost:1"\n', ExitCode.USAGE),
        ('teacher.address = "localhost:1"\ndata.tokenizer = "student"\n', ExitCode.OK),
        ('teacher.address = "localhost:1"\nstudent.model = "own/model"\n', ExitCode.OK),
        ('teacher.model = "own/model"\n', ExitCode.OK),
    ):
        Path("job.toml").write_text(job + keys)
        assert main(["config", "check", "job.toml"]) == code
        error = "error: data.tokenizer: a capture from teacher.address needs a tokenizer; set the"
        assert (error in capsys.readouterr().err) == (code == ExitCode.USAGE)


def test_conversations_need_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert check('data.path = "chats.jsonl"\n') == ExitCode.USAGE
    assert "error: data.messages_column: the tokenizer has no chat template" in (
        capsys.readouterr().err
    )


def test_a_template_of_the_job_leaves_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert check('student.chat_template = "chat.jinja"\ndata.path = "chats.jsonl"\n') == ExitCode.OK
    assert capsys.readouterr() == ("job.toml: ok\n", "")


@pytest.mark.parametrize(
    "method",
    ['method.type = "sft"', 'method.type = "offline"', 'method.type = "rl"\nreward.type = "f1"'],
)
def test_a_template_of_no_teacher_is_refused(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.toml").write_text(
        f'{method}\nstudent.model = "student"\nstudent.chat_template = "teacher"\n'
        'data.path = "chats.jsonl"\n'
    )
    assert main(["config", "check", "job.toml"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "student.chat_template: the job has no teacher; name a .jinja file" in error
