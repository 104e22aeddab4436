"""Tokens and TLS on every connection from the client to the teacher, and secrecy of the tokens."""

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

# Fixtures of the security tests, imported by name.
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
    """mTLS and tokens on both services; the trainer has only its own token for the teacher."""
    from tests.student_trainer.tiny import job

    server_token = secrets.token_urlsafe(32)
    tls_options = (*certificates.tls(), "--tls-client-ca", certificates.pem("ca"))
    identity = {
        "DISTILL_TLS_CA": certificates.pem("ca"),
        "DISTILL_TLS_CERT": certificates.pem("client"),
        "DISTILL_TLS_KEY": certificates.key("client"),
    }
    for name, value in {**identity, "DISTILL_TOKEN": server_token}.items():
        monkeypatch.setenv(name, str(value))
    job_variables = {**identity, "DISTILL_TEACHER_TOKEN": tokens.admin}
    log = tmp_path / "teacher.log"
    with (
        guarded_teacher(material, log, "--token-file", tokens.file, *tls_options) as teacher,
        server(
            tmp_path / "runs",
            *tls_options,
            variables={**job_variables, "DISTILL_TOKENS": f"submit {server_token}"},
        ) as jobs,
        DistillClient(jobs.address) as client,
    ):
        config = job(material, teacher.address, max_steps=12)
        submitted_job = client.submit(config)
        for event in client.watch(submitted_job.id):
            if event.step == 3:
                trainer = trainer_of(submitted_job.id)
                environment = trainer.environ()
                command = " ".join(trainer.cmdline())
        ended_job = client.get(submitted_job.id)
        assert ended_job.state is JobState.SUCCEEDED, ended_job.reason
    trainer_variables = {name for name in environment if name.startswith("DISTILL_")}
    assert trainer_variables >= set(job_variables)
    trainer_token = scoped_token(tokens.admin, submitted_job.id, 1)
    assert environment["DISTILL_TEACHER_TOKEN"] == trainer_token
    assert f"called by a job method=Score job={submitted_job.id} attempt=1" in log.read_text()
    assert "DISTILL_TOKENS" not in trainer_variables
    assert "DISTILL_TOKEN" not in trainer_variables
    all_tokens = [tokens.read, tokens.submit, tokens.admin, server_token, trainer_token]
    assert not any(token in environment.values() for token in all_tokens[:-1])
    assert not any(token in command for token in all_tokens)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"job.json", "rank-0.log", "metrics.jsonl"} <= {path.name for path in files}
    for token in all_tokens:
        assert not any(token.encode() in path.read_bytes() for path in files)


def trainer_of(job_id: str) -> psutil.Process:
    """Return the trainer process, not the shim, whose command line contains the same command."""
    lines = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    [trainer] = [
        process
        for process, line in lines.items()
        if line[1:4] == ["-P", "-m", "student_trainer"] and job_id in " ".join(line)
    ]
    return trainer


def test_a_server_without_the_token_says_so(
    material: Material, tmp_path: Path, tokens: Secrets
) -> None:
    from tests.student_trainer.tiny import job

    log = tmp_path / "teacher.log"
    with (
        guarded_teacher(material, log, "--token-file", tokens.file) as teacher,
        server(tmp_path / "runs") as jobs,
        DistillClient(jobs.address) as client,
        pytest.raises(
            WrongState, match="does not accept the token of the distill server"
        ) as caught,
    ):
        client.submit(job(material, teacher.address))
    assert caught.value.field == "teacher.address"
    assert "DISTILL_TEACHER_TOKEN" in caught.value.hint
