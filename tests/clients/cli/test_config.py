"""`distill config check` of the files and models that a job names on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.preflight import data_files
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": ', "data.path: late.jsonl:4001 is not JSON"),
        ('{"prompt": "1"}', "data.answer_column: there is no column 'answer' in row 4001 of late."),
        ('{"prompt": null, "answer": "2"}', "data.prompt_column: row 4001 of late.jsonl has"),
        ('{"prompt": "1", "answer": {}}', "data.answer_column: row 4001 of late.jsonl has"),
        ('{"prompt": "1", "answer": "2", "w": -1}', "data.weight_column: row 4001 of late."),
    ],
)
def test_all_records_of_a_local_file_are_checked(
    line: str, problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = '{"prompt": "1", "answer": "2", "w": 1}'
    weights = 'data.weight_column = "w"\n' * ('"w"' in line)
    Path("late.jsonl").write_text("\n".join([good] * 4000 + [line] + [good] * 9))
    job = f'data.path = "late.jsonl"\ndata.prompt_column = "prompt"\n{weights}'
    assert check(job) == ExitCode.USAGE
    assert f"error: {problem}" in capsys.readouterr().err
    monkeypatch.setattr(data_files, "_MAX_CHECKED_BYTES", 1000)
    assert check(job) == ExitCode.OK
    notes = capsys.readouterr().err
    assert "data.path: late.jsonl has 0.0 GB: not all of its records are checked here" in notes


def test_data_that_are_not_checked_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("saved").mkdir()
    for path, suggestion in (
        ("saved", ""),
        ("own/data", ""),
        ("s3://bucket/chats.jsonl", ""),
        ("chats.jsonI", ". Did you mean chats.jsonl?"),
    ):
        assert check(f'data.path = "{path}"\ndata.prompt_column = "prompt"\n') == ExitCode.OK
        note = f"data.path: the records of {path} are not checked here; the job checks them at its"
        assert f"{note} start{suggestion}\n" in capsys.readouterr().err


def test_a_long_check_tells_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("few.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 3)
    monkeypatch.setattr(data_files, "_SECONDS_BETWEEN_REPORTS", -1.0)
    assert check('data.path = "few.jsonl"\n') == ExitCode.OK
    lines = [f"checking data.path: {count} records so far" for count in range(3)]
    assert capsys.readouterr().err.splitlines()[-3:] == lines
