"""Tokens of trainers: derived for one attempt, and valid only for scoring by teachers."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import statistics
import sys
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from clients.runs.directory import RunDirectory
from clients.runs.fence import VARIABLE as FENCE
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import Share
from distill_server.runners.trainer_environment import attempt_tokens
from protos.auth.access import REQUIRED_ROLES, Role, Tokens, read_tokens
from protos.auth.scoped_token import scoped_token
from protos.errors import Forbidden, InvalidInput
from protos.rpc.channel import ROLLOUTS_TOKEN, TEACHER_TOKEN, open_channel
from tests.distill_server.conftest import eventually, job_config
from tests.security.conftest import Secrets
from tests.security.processes import Program
from tests.security.test_access import (
    SERVER_METHODS,
    TEACHER_METHODS,
    Metadata,
    bearer,
    call,
)
from tests.security.timing import times_in_turns

JOB = "on-policy-qwen3-0.6b-7f3a"


def test_what_a_token_is_made_of(tokens: Secrets) -> None:
    """Compute the token independently, as the module documents it."""
    key = hmac.new(tokens.admin.encode(), b"distill scoped token 1", hashlib.sha256).digest()
    text = f"scoped.{JOB}.3"
    tag = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    assert scoped_token(tokens.admin, JOB, 3) == f"{text}.{tag}"


@pytest.mark.parametrize("role", Role)
def test_every_token_of_a_teacher_is_a_parent(tokens: Secrets, role: Role) -> None:
    known_tokens = read_tokens(tokens.file)
    token = scoped_token(getattr(tokens, role.name.lower()), JOB, 12)
    assert known_tokens.scope_of(token) == f"{JOB}.12"
    # It is not an ordinary token, so no other server and no dashboard accepts it.
    assert known_tokens.role_of(token) is None
    assert token not in repr(vars(known_tokens))
    for unknown_token in (tokens.read, scoped_token(secrets.token_urlsafe(32), JOB, 12)):
        assert known_tokens.scope_of(unknown_token) is None


def test_changing_the_parent_ends_its_tokens(tokens: Secrets) -> None:
    token = scoped_token(tokens.submit, JOB, 1)
    assert Tokens({tokens.submit: Role.SUBMIT, tokens.read: Role.READ}).scope_of(token)
    assert Tokens({tokens.read: Role.READ}).scope_of(token) is None


def forgeries(tokens: Secrets) -> dict[str, str]:
    token = scoped_token(tokens.admin, JOB, 3)
    text, tag = token.rsplit(".", 1)
    first_digit, last_digit = ("0" if char != "0" else "1" for char in (tag[0], tag[-1]))
    digest = hashlib.sha256(tokens.admin.encode()).digest()
    return {
        "another attempt": f"scoped.{JOB}.4.{tag}",
        "another job": f"scoped.{JOB}0.3.{tag}",
        "first digit": f"{text}.{first_digit}{tag[1:]}",
        "last digit": f"{text}.{tag[:-1]}{last_digit}",
        "no tag": text,
        "half a tag": f"{text}.{tag[:32]}",
        "capitals": f"{text}.{tag.upper()}",
        "of nobody": scoped_token(secrets.token_urlsafe(32), JOB, 3),
        "of the digest": f"{text}.{hmac.digest(digest, text.encode(), 'sha256').hex()}",
        "of itself": scoped_token(token, JOB, 3),
        "without a key": f"{text}.{hashlib.sha256(text.encode()).hexdigest()}",
        "no job": f"scoped..3.{tag}",
        "a number too long": f"scoped.{JOB}.{'3' * 40}.{tag}",
        "oversized": f"scoped.{'a' * 4000}.3.{tag}",
        "the longest": f"scoped.{'a' * 430}.3.{tag}",
        "two lines": f"{token}\n",
        "not ASCII": f"scoped.{JOB}\u0663.3.{tag}",
        "digits of Arabic": f"scoped.{JOB}.\u0663.{tag}",
        "a path": f"scoped.../../x.3.{tag}",
        "for rollout services": scoped_token(tokens.admin, JOB, 3, rollouts=True),
        "renamed": f"rollouts.{JOB}.3.{tag}",
    }


def test_forgeries_are_nobodys(tokens: Secrets) -> None:
    known_tokens = read_tokens(tokens.file)
    for name, forged in forgeries(tokens).items():
        assert known_tokens.scope_of(forged) is None, name
        assert known_tokens.role_of(forged) is None, name


def test_forgeries_get_the_answer_of_everybody_without_a_token(
    guarded_server: Program, guarded_teacher: Program, tokens: Secrets
) -> None:
    sendable = {
        name: forged
        for name, forged in forgeries(tokens).items()
        if forged.isascii() and forged.isprintable()
    }
    assert len(sendable) >= 15
    answers = set()
    for program, methods in ((guarded_server, SERVER_METHODS), (guarded_teacher, TEACHER_METHODS)):
        with grpc.insecure_channel(program.address) as channel:
            for method in methods:
                forged_metadata = [bearer(forged) for forged in sendable.values()]
                answers |= {call(channel, method, metadata) for metadata in [*forged_metadata, []]}
    assert len(answers) == 1
    assert answers.pop().code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", Role)
def test_a_scoped_token_reads_from_teachers_and_from_nobody_else(
    guarded_server: Program, guarded_teacher: Program, tokens: Secrets, role: Role
) -> None:
    """The rights of the parent do not matter; both services know the parent."""
    metadata: Metadata = bearer(scoped_token(getattr(tokens, role.name.lower()), JOB, 1))
    with grpc.insecure_channel(guarded_server.address) as channel:
        stranger_answer = call(channel, SERVER_METHODS[0], [])
        assert {call(channel, method, metadata) for method in SERVER_METHODS} == {stranger_answer}
    with grpc.insecure_channel(guarded_teacher.address) as channel:
        for method in TEACHER_METHODS:
            answer = call(channel, method, metadata)
            is_denied = answer.code is grpc.StatusCode.PERMISSION_DENIED
            assert is_denied == (REQUIRED_ROLES[method] is Role.ADMIN), (method, answer)
            assert answer.code is not grpc.StatusCode.UNAUTHENTICATED


def test_a_trainer_scores_and_the_log_names_its_job(
    guarded_teacher: Program, tokens: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the client of trainers; the log contains neither the token nor its parent."""
    token = scoped_token(tokens.admin, JOB, 7)
    monkeypatch.setenv(TEACHER_TOKEN, token)
    ids = np.arange(8, dtype=np.int32)
    with TeacherClient(guarded_teacher.address) as teacher:
        assert teacher.info().vocab_size == 64
        assert teacher.submit(ScoreQuery(ids, 1, top_k=4)).result(30).head_ids.shape == (7, 4)
        with pytest.raises(Forbidden, match="role read may not call PushWeights"):
            teacher.push_weights({"w": np.zeros((2, 2), np.float32)})
    log = guarded_teacher.log.read_text()
    for method in ("GetInfo", "Score"):
        assert re.search(rf"called by a job method={method} job={JOB} attempt=7\n", log), log
    assert token not in log
    assert tokens.admin not in log


@pytest.mark.parametrize("from_file", [False, True], ids=["variable", "file"])
def test_a_real_trainer_sees_no_token_but_its_own(
    from_file: bool, tmp_path: Path, tokens: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks environment and command line of the shim and of its child process."""
    file = tmp_path / "parent"
    if from_file:
        file.touch(0o600)
        file.write_text(tokens.admin + "\n")
        monkeypatch.setenv(f"{TEACHER_TOKEN}_FILE", str(file))
    else:
        monkeypatch.setenv(TEACHER_TOKEN, tokens.admin)
    monkeypatch.setenv("DISTILL_TOKENS", f"submit {tokens.submit}")
    run = RunDirectory.create(tmp_path / JOB, job_config())

    def sleep_command(
        run: Path, *, attempt: int, processes: int, from_step: int | None
    ) -> list[str]:
        return [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(1000)"]

    runner = LocalRunner(command=sleep_command)  # type: ignore[arg-type]
    runner.start(run, attempt=2, processes=1, from_step=None, share=Share(1))
    try:
        eventually(lambda: run.log_file(2).read_text() == "1\n")
        (shim,) = runner._children.values()
        processes = [psutil.Process(shim.pid), *psutil.Process(shim.pid).children(recursive=True)]
        assert len(processes) == 2
        for process in processes:
            variables = process.environ()
            distill_variables = {
                name: value for name, value in variables.items() if name.startswith("DISTILL_")
            }
            assert distill_variables[TEACHER_TOKEN] == scoped_token(tokens.admin, JOB, 2)
            assert set(distill_variables) <= {TEACHER_TOKEN, FENCE, "DISTILL_ATTEMPT_MARK"}, set(
                distill_variables
            )
            all_text = "\0".join([*variables.values(), *process.cmdline()])
            assert not any(token in all_text for token in (tokens.admin, tokens.submit, str(file)))
    finally:
        runner.stop(run, 2, now=True)
        shim.wait(20)


def test_each_start_reads_the_parent_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: Secrets
) -> None:
    assert attempt_tokens(JOB, 1) == {}
    monkeypatch.setenv(ROLLOUTS_TOKEN, tokens.admin)
    variables = {ROLLOUTS_TOKEN: scoped_token(tokens.admin, JOB, 1, rollouts=True)}
    assert attempt_tokens(JOB, 1) == variables
    monkeypatch.delenv(ROLLOUTS_TOKEN)
    file = tmp_path / "parent"
    monkeypatch.setenv(f"{TEACHER_TOKEN}_FILE", str(file))
    for parent in (tokens.read, tokens.submit):
        file.touch(0o600)
        file.write_text(parent)
        assert attempt_tokens(JOB, 1) == {TEACHER_TOKEN: scoped_token(parent, JOB, 1)}
    file.unlink()
    with pytest.raises(InvalidInput, match=f"{TEACHER_TOKEN}_FILE"):
        attempt_tokens(JOB, 1)


def test_what_the_server_itself_asks_with(
    guarded_teacher: Program,
    guarded_server: Program,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server queries an address from a job, so it must never send a parent token there."""
    monkeypatch.setenv(TEACHER_TOKEN, tokens.admin)
    with TeacherClient(guarded_teacher.address, scope="preflight") as teacher:
        assert teacher.info().vocab_size == 64
        with pytest.raises(Forbidden):
            teacher.push_weights({"w": np.zeros((2, 2), np.float32)})
    assert "job=preflight attempt=0" in guarded_teacher.log.read_text()
    with open_channel(guarded_server.address, token=TEACHER_TOKEN, scope="preflight") as channel:
        answer = call(channel, SERVER_METHODS[0], [])
    assert answer.code is grpc.StatusCode.UNAUTHENTICATED


def test_the_time_of_a_comparison_tells_nothing(tokens: Secrets) -> None:
    """10^4 tags that are wrong in the first digit, 10^4 in the last, taken in turns.

    Comparing only two of the three keys would save a fifth of the time; the memory address of a
    string changes it by a hundredth.
    """
    known_tokens = read_tokens(tokens.file)
    forged = forgeries(tokens)
    wrong = (forged["first digit"], forged["last digit"])
    times = times_in_turns(known_tokens.scope_of, wrong)
    medians = [statistics.median(nanoseconds) for nanoseconds in times]
    print(f"\nmedians {medians} ns")
    assert abs(medians[0] - medians[1]) < 0.05 * max(medians)


def test_a_tag_is_compared_under_every_token(
    tokens: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or original(a, b))
    known_tokens = read_tokens(tokens.file)
    for token in (scoped_token(tokens.read, JOB, 1), forgeries(tokens)["first digit"]):
        compared.clear()
        known_tokens.scope_of(token)
        assert [len(digest) for digest in compared] == [32, 32, 32]
