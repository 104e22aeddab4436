"""`distill doctor` with a token that a server or a teacher does not know."""

from __future__ import annotations

import pytest

from clients.cli.app import main
from protos.errors import ExitCode
from protos.rpc.channel import SERVER_TOKEN, TEACHER_TOKEN
from tests.security.conftest import Program, Secrets

Capture = pytest.CaptureFixture[str]
UNKNOWN = "x" * 43


def test_an_unknown_token_is_told(
    guarded_server: Program,
    guarded_teacher: Program,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    server, teacher = guarded_server.address, guarded_teacher.address
    command = ["--server", server, "doctor", "--teacher", teacher]
    for variable in (SERVER_TOKEN, TEACHER_TOKEN):
        monkeypatch.setenv(variable, UNKNOWN)
    assert main(command) == ExitCode.JOB_FAILED
    report = capsys.readouterr().out
    assert [line for line in report.splitlines() if line.startswith("problem")] == [
        f"problem: server: {server} does not accept the token; set $DISTILL_TOKEN to a token of"
        f" its token file",
        f"problem: teacher: {teacher} does not accept the token; set $DISTILL_TEACHER_TOKEN to a"
        f" token of its token file",
    ]
    assert "distill token" not in report
    monkeypatch.setenv(SERVER_TOKEN, "short")
    main(command)
    assert "copy a token of the server's token file" in capsys.readouterr().out
