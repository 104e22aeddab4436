"""Commands that talk to a server, with a scripted client."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import distill_server.dashboard
from clients.cli.app import main
from clients.cli.commands.logs_and_files import decode_lines
from clients.config.file import JobFile
from clients.jobs.job import Job, JobEvent, JobState
from protos.errors import (
    ExitCode,
    Forbidden,
    InternalFault,
    InvalidInput,
    NotFound,
    TimedOut,
    Unavailable,
    WrongState,
)

Capture = pytest.CaptureFixture[str]


FAULTS: dict[ExitCode, BaseException] = {
    ExitCode.JOB_FAILED: InternalFault("a defect; id 7f3a"),
    ExitCode.USAGE: InvalidInput("is wrong", field="max_steps"),
    ExitCode.NOT_FOUND: NotFound("no job x"),
    ExitCode.UNREACHABLE: Unavailable("cannot reach the server"),
    ExitCode.WRONG_STATE: WrongState("it runs"),
    ExitCode.TIMED_OUT: TimedOut("not over after 3 s"),
    ExitCode.REFUSED: Forbidden("may not"),
}
EVENTS = {
    ExitCode.OK: JobState.SUCCEEDED,
    ExitCode.JOB_FAILED: JobState.FAILED,
    ExitCode.JOB_CANCELLED: JobState.CANCELLED,
}


def make_job(state: JobState = JobState.RUNNING, **changes: Any) -> Job:
    defaults: dict[str, Any] = {
        "id": "on-policy-x-7f3a", "name": "x", "kind": "on_policy", "state": state, "reason": "",
        "phase": "training", "attempt": 1, "step": 12, "max_steps": 50, "created_at": 1.0,
        "started_at": 2.0, "ended_at": 0.0, "last_seq": 3, "metrics": {"kl/teacher": 0.25},
    }  # fmt: skip
    return Job(**{**defaults, **changes})


def make_event(seq: int, state: JobState, step: int = 0, **changes: Any) -> JobEvent:
    defaults: dict[str, Any] = {"reason": "", "phase": "training", "metrics": {}, "attempt": 1}
    return JobEvent(
        seq=seq, time=1e9 + seq, state=state, step=step, max_steps=50, **{**defaults, **changes}
    )


class ScriptedClient:
    """Stands in for DistillClient: answers from `events`, records calls."""

    events: tuple[JobEvent | BaseException, ...] = ()
    calls: list[tuple[Any, ...]]

    def __init__(self, address: str, *, timeout: float = 0.0) -> None:
        self.address = address

    def __enter__(self) -> ScriptedClient:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit_all(
        self, jobs: Sequence[JobFile], *, upload: bool, report: object, idempotency_key: str
    ) -> list[Job]:
        [file] = jobs
        assert not upload
        self.calls.append(("submit", file.config, file.text, idempotency_key))
        return [make_job(JobState.QUEUED)]

    def get(self, job_id: str) -> Job:
        return make_job()

    def list(
        self,
        *,
        state: JobState | None = None,
        limit: int = 50,
        owner: str = "",
        mine: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> list[Job]:
        self.calls.append(("list", state, limit))
        assert (owner, mine, labels or {}) == ("", False, {})
        return [make_job(), make_job(JobState.FAILED, id="on-policy-y-0001", reason="no teacher")]

    def cancel(self, job_id: str, *, now: bool) -> Job:
        self.calls.append(("cancel", job_id, now))
        return make_job(JobState.CANCELLING)

    def resume(self, job_id: str, *, max_steps: int | None, from_step: int | None) -> Job:
        self.calls.append(("resume", job_id, max_steps, from_step))
        return make_job(JobState.QUEUED, attempt=2)

    def watch(self, job_id: str, *, timeout: float | None = None) -> Iterator[JobEvent]:
        self.calls += [("watch", timeout)] if timeout else []
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    def logs(self, job_id: str, *, attempt: int, follow: bool, tail_lines: int) -> Iterator[bytes]:
        self.calls.append(("logs", attempt, follow, tail_lines))
        yield from (b"one\ntw", b"o\nthree")

    def pull(self, job_id: str, destination: Path, *, checkpoint: int | None) -> Path:
        self.calls.append(("pull", str(destination), checkpoint))
        return destination


def raise_error(error: Exception) -> None:
    raise error


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedClient]:
    monkeypatch.setattr("clients.jobs.client.DistillClient", ScriptedClient)
    ScriptedClient.calls = []
    ScriptedClient.events = (
        make_event(1, JobState.QUEUED, phase=""),
        make_event(2, JobState.RUNNING, phase="training"),
        make_event(
            3, JobState.RUNNING, 10, metrics={"loss": 0.5, "kl/teacher": 0.25, "eval/kl": 0.3}
        ),
        make_event(4, JobState.RUNNING, 11, metrics={"loss": 0.4, "kl/teacher": 0.24}),
        make_event(5, JobState.SUCCEEDED, 50, phase=""),
    )
    return ScriptedClient


def test_reasons_do_not_drive_the_terminal(
    capsys: Capture, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(JobState.FAILED, reason="one\ntwo\x1b[2J\u009b")
    monkeypatch.setattr(client, "list", lambda *_, **__: [job])
    monkeypatch.setattr(client, "get", lambda *_: job)
    client.events = (make_event(1, JobState.FAILED, reason=job.reason, phase=""),)
    for command, code in (
        (["ls"], 0),
        (["show", "x"], 0),
        (["watch", "x"], ExitCode.JOB_FAILED),
    ):
        assert main(command) == code
        captured = capsys.readouterr()
        assert r"one two\x1b[2J\x9b" in captured.out
        assert "\x1b" not in captured.err
    monkeypatch.setattr(client, "get", lambda *_: raise_error(NotFound(job.reason)))
    assert main(["show", "x"]) == ExitCode.NOT_FOUND
    assert r"two\x1b[2J" in capsys.readouterr().err


def test_an_empty_server_is_one_sentence(capsys: Capture) -> None:
    assert main(["--server", "", "ls"]) == ExitCode.USAGE
    error_text = capsys.readouterr().err
    assert (
        error_text == "error: --server: the address is empty; give HOST:PORT, or omit the option\n"
    )


def test_ls(capsys: Capture, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["ls", "--state", "failed", "--limit", "3"]) == 0
    assert client.calls == [("list", JobState.FAILED, 3)]
    head, first_row, second_row = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["ID", "STATE", "STEPS", "RESULT"]
    assert first_row.split()[:5] == ["on-policy-x-7f3a", "RUNNING", "12/50", "0.25", "kl"]
    assert second_row.endswith("no teacher")
    assert main(["--json", "ls"]) == 0
    rows = json.loads(capsys.readouterr().out)["jobs"]
    bounded = make_job(metrics={"kl/teacher_bound": 0.5})
    monkeypatch.setattr(client, "list", lambda *_, **__: [bounded])
    assert main(["ls"]) == 0
    assert "12/50  0.5 kl bound  " in capsys.readouterr().out
    sft = make_job(metrics={"loss": 0.4, "cross_entropy": 0.75})
    monkeypatch.setattr(client, "list", lambda *_, **__: [sft])
    assert main(["ls"]) == 0
    assert "12/50  0.75 loss  " in capsys.readouterr().out
    values = {"id", "state", "step", "max_steps", "metrics", "attempt", "owner", "name", "reason"}
    assert values <= rows[0].keys()
    assert not {"steps", "kl", "age", "result"} & rows[0].keys(), "texts for people"
    times = [rows[0][name] for name in ("created_at", "started_at", "ended_at")]
    assert times == ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z", None]


def test_a_terminal_shows_lines_of_its_width(
    capsys: Capture, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(JobState.FAILED, reason="why " * 50)
    monkeypatch.setattr(client, "list", lambda *_, **__: [job])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ls"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert len(row) == 80
    assert row.endswith("...")
    assert head.endswith("REASON")
    job = make_job(id=f"on-policy-{'long-' * 20}seed-3", name="y" * 70, owner="ann")
    other = make_job(id="on-policy-seed-1", owner="ben", reason="")
    monkeypatch.setattr(client, "list", lambda *_, **__: [job, other])
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "ATTEMPT" not in lines[0], "an id needs the place"
    assert all(text in lines[1] for text in ("...", "seed-3", "RUNNING", "12/50", "0.25 kl"))
    assert lines[2].startswith("on-policy-seed-1 ")
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ATTEMPT" in lines[0]
    assert job.id in lines[1]


def test_the_commands_of_the_job_page(
    client: type[ScriptedClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(distill_server.dashboard.__file__).parent / "static" / "commands_view.js"
    words = set(re.findall(r'"(\w+ JOB[^"]*)"', script.read_text()))
    assert {command.split()[0] for command in words} == {
        *("watch", "logs", "cancel", "pull", "resume", "show")
    }
    monkeypatch.chdir(tmp_path)
    for command in sorted(words):
        _, *arguments = shlex.split(f"distill {command.replace('JOB', 'x-7f3a')} --server h:1")
        assert main(arguments) == 0, command


def test_ctrl_c_while_the_jobs_of_a_file_are_watched(
    capsys: Capture,
    client: type[ScriptedClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [make_job(JobState.QUEUED, id=f"job-{number}") for number in range(3)]
    submit_all = lambda self, configs, **_: jobs[: len(configs)]  # noqa: E731
    monkeypatch.setattr(client, "submit_all", submit_all, raising=False)
    client.events = (make_event(1, JobState.RUNNING), KeyboardInterrupt())
    path = tmp_path / "sweep.toml"
    path.write_text(
        'student.model = "org/m"\ndata.path = "org/d"\nteacher.address = "h:1"\n'
        "[sweep]\nseed = [1, 2, 3]\n"
    )
    assert main(["submit", str(path), "-f"]) == ExitCode.INTERRUPTED
    error = capsys.readouterr().err
    assert error.count("continues; to watch the job again") == 1
    assert "2 further jobs continue" in error


def test_a_log_does_not_drive_the_terminal(
    capsysbinary: pytest.CaptureFixture[bytes],
    client: type[ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = b"5%\r100%\r\nred \x1b[31m\x1b]0;title\x07\tb\xc3"
    monkeypatch.setattr(client, "logs", lambda *_, **__: iter((log, b"\xa4\n")))
    assert main(["logs", "x"]) == 0
    assert capsysbinary.readouterr().out == log + b"\xa4\n", "a pipe gets its bytes"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["logs", "x"]) == 0
    expected = "5%\n100%\nred \\x1b[31m\\x1b]0;title\\x07\tb\u00e4\n"
    assert capsysbinary.readouterr().out.decode() == expected


def test_show_cancel_resume_pull(capsys: Capture, client: type[ScriptedClient]) -> None:
    assert main(["show", "@last"]) == 0
    assert "state                RUNNING training" in capsys.readouterr().out
    assert main(["cancel", "x", "--now"]) == 0
    assert capsys.readouterr().out == "on-policy-x-7f3a CANCELLING\n"
    assert main(["resume", "x", "--set", "max_steps=9", "--from", "4"]) == 0
    assert main(["pull", "x", "--checkpoint", "4"]) == 0
    assert main(["--json", "pull", "x", "-o", "out"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "path": "out",
        "checkpoint": None,
    }
    assert main(["pull", "x", "--checkpoint", "bets"]) == ExitCode.USAGE
    error_text = capsys.readouterr().err
    assert error_text == "error: --checkpoint: 'bets' is not a step; give a step, best or last\n"
    assert client.calls == [
        ("cancel", "x", True),
        ("resume", "x", 9, 4),
        ("pull", "on-policy-x-7f3a", 4),
        ("pull", "out", None),
    ]


def test_submit_prints_the_id_alone(
    capsys: Capture, client: type[ScriptedClient], job_file: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").touch()
    assert main(["submit", job_file(), "--set", "data.path=d.jsonl", "--name", "n"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "on-policy-x-7f3a\n"
    assert [line.split()[:2] for line in captured.err.splitlines()] == [
        ["distill", "watch"],
        ["distill", "logs"],
        ["distill", "cancel"],
    ]
    _, config, text, key = client.calls[0]
    assert key == ""
    assert (config.name, config.data.path) == ("n", "d.jsonl")
    assert text.startswith("student.model")


def test_watch_without_a_terminal(capsys: Capture) -> None:
    assert main(["watch", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "on-policy-x-7f3a SUCCEEDED  50/50 steps  eval/kl 0.3\n"
    status_lines = [line.split("  ", 1)[1] for line in captured.err.splitlines()]
    assert status_lines == [
        "on-policy-x-7f3a QUEUED",
        "on-policy-x-7f3a RUNNING training",
        "on-policy-x-7f3a RUNNING training  10/50  loss 0.5  kl 0.25  eval/kl 0.3",
        "on-policy-x-7f3a SUCCEEDED  50/50",
    ]
    assert "\033" not in captured.err


def test_watch_as_json_lines(capsys: Capture) -> None:
    assert main(["--json", "watch", "x"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[2]["metrics"]["loss"] == 0.5


def test_a_terminal_is_notified_of_the_end(
    capsys: Capture, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["watch", "x", "--notify"]) == ExitCode.USAGE
    assert "--notify: stderr is not a terminal" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["watch", "x", "--notify"]) == 0
    assert capsys.readouterr().err.endswith("\a\033]9;on-policy-x-7f3a RUNNING\033\\")
    client.events = (KeyboardInterrupt(),)
    assert main(["watch", "x", "--notify"]) == ExitCode.INTERRUPTED
    assert "\a" not in capsys.readouterr().err


@pytest.mark.parametrize(("code", "state"), EVENTS.items())
def test_the_exit_code_is_the_verdict(
    capsys: Capture, client: type[ScriptedClient], state: JobState, code: ExitCode
) -> None:
    client.events = (make_event(1, state, 3, reason="so it went"),)
    assert main(["-q", "watch", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == f"on-policy-x-7f3a {state}  3/50 steps  so it went\n"
    assert captured.err == ""


def test_ctrl_c_detaches(
    capsys: Capture, client: type[ScriptedClient], job_file: Callable[..., str]
) -> None:
    client.events = (make_event(1, JobState.RUNNING), KeyboardInterrupt())
    assert main(["submit", "-f", job_file()]) == ExitCode.INTERRUPTED
    last_line = capsys.readouterr().err.splitlines()[-1]
    job_id = "on-policy-x-7f3a"
    assert last_line == f"job {job_id} continues; to watch the job again: distill watch {job_id}"
    assert [call[0] for call in client.calls] == ["submit"]


def test_logs(capsysbinary: pytest.CaptureFixture[bytes], client: type[ScriptedClient]) -> None:
    assert main(["logs", "x", "-f", "-n", "5", "--attempt", "2"]) == 0
    assert capsysbinary.readouterr().out == b"one\ntwo\nthree"
    assert client.calls == [("logs", 2, True, 5)]
    assert main(["--json", "logs", "x"]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert [json.loads(line)["line"] for line in lines] == ["one", "two", "three"]


def test_whole_lines_of_broken_text() -> None:
    assert list(decode_lines([b"a\xff\n", b"", b"\n"])) == ["a\ufffd", ""]


def test_submit_under_a_key(
    capsys: Capture, client: type[ScriptedClient], job_file: Callable[..., str]
) -> None:
    assert main(["--json", "submit", job_file(), "--key", "mine"]) == 0
    assert client.calls[0][3] == "mine"
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {field.name for field in fields(Job)} - {"checkpoints", "config_json"}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("code", [*FAULTS])
def test_a_fault_decides_the_exit_code(
    capsys: Capture, client: type[ScriptedClient], code: ExitCode, as_json: bool
) -> None:
    fault = FAULTS[code]
    client.events = (make_event(1, JobState.RUNNING), fault)
    assert main([*(["--json"] if as_json else ["-q"]), "watch", "x", "--timeout", "3"]) == code
    assert client.calls == [("watch", 3.0)]
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == int(as_json)
    if as_json:
        error = json.loads(captured.err)["error"]
        assert set(error) == {"code", "message", "field", "hint"}
        assert error["message"] == getattr(fault, "message", None)
    else:
        assert captured.err == f"error: {fault}\n"


def test_every_exit_code_has_a_test() -> None:
    assert {*FAULTS, *EVENTS, ExitCode.INTERRUPTED} == set(ExitCode)


def test_ctrl_c_in_logs(
    capsys: Capture, client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def logs(*_: object, **__: object) -> Iterator[bytes]:
        yield b"one\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "logs", logs)
    assert main(["logs", "x", "-f"]) == ExitCode.INTERRUPTED
    captured = capsys.readouterr()
    assert captured.out == "one\n"
    assert captured.err == "the job continues; to follow the log again: distill logs -f x\n"


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("show ", ["@last", "on-policy-x-7f3a", "on-policy-y-0001"]),
        ("show on-policy-y", ["on-policy-y-0001"]),
        ("ls --label ", ["project=math", "seed=1"]),
        ("table --metric kl", ["kl/teacher"]),
        ("submit job.toml --set train.optimizer.w", []),
        ("submit job.toml --set train.weight_d", ["train.weight_decay="]),
        ("run job.toml --set method.critic_l", ["method.critic_learning_rate="]),
    ],
)
def test_words_are_completed(
    capsys: Capture,
    client: type[ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    offers: Sequence[str],
) -> None:
    jobs = [
        make_job(labels={"project": "math", "seed": "1"}),
        make_job(id="on-policy-y-0001", labels={"project": "math"}),
    ]
    monkeypatch.setattr(client, "list", lambda *_, **__: jobs)
    words = f"distill {line}".split(" ")
    for name, value in (
        ("_DISTILL_COMPLETE", "complete_bash"),
        ("COMP_CWORD", str(len(words) - 1)),
        ("COMP_WORDS", "\n".join(words)),
    ):
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == list(offers)
