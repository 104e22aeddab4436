"""Tokens and TLS from the client to the teacher: a job over the whole line, and its secrets."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from protos.auth.scoped_token import scoped_token
from protos.errors import WrongState
from tests.end_to_end.conftest import teacher_arguments
from tests.security.conftest import Certificates, Secrets, certificates, tokens
from tests.security.processes import Program, server

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

# Fixtures of the security tests, by their names.
__all__ = ["certificates", "tokens"]


@contextmanager
def guarded_teacher(material: Material, log: Path, *options: object) -> Iterator[Program]:
    program = Program("teacher_service", *teacher_arguments(material), *options, log=log)
    try:
        yield program
    finally:
        program.close()


@pytest.mark.slow
def test_a_guarded_line(
    material: Material,
    tmp_path: Path,
    tokens: Secrets,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mTLS and tokens on both servers; the trainer has one of its own for the teacher, no other."""
    from tests.student_trainer.tiny import job

    of_server = secrets.token_urlsafe(32)
    guard = (*certificates.tls(), "--tls-client-ca", certificates.pem("ca"))
    identity = {
        "DISTILL_TLS_CA": certificates.pem("ca"),
        "DISTILL_TLS_CERT": certificates.pem("client"),
        "DISTILL_TLS_KEY": certificates.key("client"),
    }
    for name, value in {**identity, "DISTILL_TOKEN": of_server}.items():
        monkeypatch.setenv(name, str(value))
    of_jobs = {**identity, "DISTILL_TEACHER_TOKEN": tokens.admin}
    log = tmp_path / "teacher.log"
    with (
        guarded_teacher(material, log, "--token-file", tokens.file, *guard) as teacher,
        server(
            tmp_path / "runs",
            *guard,
            variables={**of_jobs, "DISTILL_TOKENS": f"submit {of_server}"},
        ) as jobs,
        DistillClient(jobs.address) as client,
    ):
        config = job(material, teacher.address, max_steps=12)
        watched = client.submit(config)
        for event in client.watch(watched.id):
            if event.step == 3:
                trainer = trainer_of(watched.id)
                environment = trainer.environ()
                command = " ".join(trainer.cmdline())
        ended = client.get(watched.id)
        assert ended.state is JobState.SUCCEEDED, ended.reason
    given = {name for name in environment if name.startswith("DISTILL_")}
    assert given >= set(of_jobs)
    own = scoped_token(tokens.admin, watched.id, 1)
    assert environment["DISTILL_TEACHER_TOKEN"] == own
    assert f"called by a job method=Score job={watched.id} attempt=1" in log.read_text()
    assert "DISTILL_TOKENS" not in given
    assert "DISTILL_TOKEN" not in given
    known = [tokens.read, tokens.submit, tokens.admin, of_server, own]
    assert not any(token in environment.values() for token in known[:-1])
    assert not any(token in command for token in known)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"job.json", "rank-0.log", "metrics.jsonl"} <= {path.name for path in written}
    for token in known:
        assert not any(token.encode() in path.read_bytes() for path in written)


def trainer_of(job_id: str) -> psutil.Process:
    """The trainer itself, and not the shim that carries its command too."""
    lines = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
    [found] = [
        process
        for process, line in lines.items()
        if line[1:4] == ["-P", "-m", "student_trainer"] and job_id in " ".join(line)
    ]
    return found


def test_a_server_without_the_token_says_so(
    material: Material, tmp_path: Path, tokens: Secrets
) -> None:
    from tests.student_trainer.tiny import job

    log = tmp_path / "teacher.log"
    with (
        guarded_teacher(material, log, "--token-file", tokens.file) as teacher,
        server(tmp_path / "runs") as jobs,
        DistillClient(jobs.address) as client,
        pytest.raises(WrongState, match="does not take the token of the distill server") as told,
    ):
        client.submit(job(material, teacher.address))
    assert told.value.field == "teacher.address"
    assert "DISTILL_TEACHER_TOKEN" in told.value.hint
