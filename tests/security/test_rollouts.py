"""The rollout service: tokens, roles and TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import pytest

from protos.auth.scoped_token import scoped_token
from protos.errors import Forbidden, InvalidInput, Unauthenticated, Unavailable
from student_trainer.rollout_client.engine_client import EngineClient
from tests.security.conftest import Certificates, Secrets
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.material import order, snapshot, student
from tests.student_trainer.rollout_service.processes import ServiceProcess


class Start(Protocol):
    def __call__(self, *args: object) -> str: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts rollout services and returns their addresses."""
    path = tiny.save(student(0), tiny.tokenizer(), tmp_path / "student")
    with ExitStack() as stack:

        def start_service(*options: object) -> str:
            arguments = ["--model", str(path), *map(str, options)]
            process = ServiceProcess(*arguments, log=tmp_path / "service.log")
            return stack.enter_context(closing(process)).address

        yield start_service


def test_the_roles(
    start: Start, tokens: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = start("--token-file", tokens.file)
    sample_order = order(snapshot(tmp_path, 1))
    with EngineClient([address]) as client:
        for call in (client.info, lambda: client.sample(sample_order)):
            with pytest.raises(Unauthenticated, match="DISTILL_ROLLOUTS_TOKEN"):
                call()
    monkeypatch.setenv(
        "DISTILL_TEACHER_TOKEN", tokens.admin
    )  # this variable is a token for teachers only
    with EngineClient([address]) as client, pytest.raises(Unauthenticated):
        client.info()
    for token in (tokens.read, tokens.submit):
        monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", token)
        with EngineClient([address]) as client:
            assert client.info().engine == "hf"
            with pytest.raises(Forbidden, match="may not call Sample"):
                client.sample(sample_order)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(tokens.admin)
    monkeypatch.delenv("DISTILL_ROLLOUTS_TOKEN")
    monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN_FILE", str(file))
    with EngineClient([address]) as client:
        assert len(list(client.sample(sample_order))) == len(sample_order.sequences)
    with pytest.raises(InvalidInput, match="would be sent unencrypted"):
        EngineClient(["gpu-node:50053"])


def test_the_token_of_an_attempt(
    start: Start, tokens: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of an attempt samples if its parent may; tokens for teachers and of attempt 0 do
    not.
    """
    address = start("--token-file", tokens.file)
    sample_order = order(snapshot(tmp_path, 1))
    attempt_tokens = [
        scoped_token(tokens.admin, "a-1", attempt, rollouts=True) for attempt in (0, 3)
    ]
    monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", attempt_tokens[1])
    with EngineClient([address]) as client:
        assert len(list(client.sample(sample_order))) == len(sample_order.sequences)
    log = (tmp_path / "service.log").read_text()
    assert "called by a job method=Sample job=a-1 attempt=3\n" in log
    monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", attempt_tokens[0])
    with EngineClient([address]) as client:
        assert client.info().engine == "hf"
        with pytest.raises(Forbidden, match="may not call Sample"):
            client.sample(sample_order)
    for token in (
        scoped_token(tokens.admin, "a-1", 3),  # for teachers
        scoped_token(tokens.submit, "a-1", 3, rollouts=True),
        attempt_tokens[1].replace("a-1", "a-2"),
    ):
        monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", token)
        with EngineClient([address]) as client, pytest.raises(Unauthenticated):
            client.info()


def test_tls(
    start: Start,
    tokens: Secrets,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = start("--token-file", tokens.file, *certificates.tls())
    assert address.startswith("https://")
    sample_order = order(snapshot(tmp_path, 1))
    monkeypatch.setenv("DISTILL_ROLLOUTS_TOKEN", tokens.admin)
    monkeypatch.setenv("DISTILL_TLS_CA", str(certificates.pem("foreign-ca")))
    is_refused = pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED")
    with EngineClient([address], patience_seconds=0.2) as client, is_refused:
        client.sample(sample_order)
    monkeypatch.setenv("DISTILL_TLS_CA", str(certificates.pem("ca")))
    with EngineClient([address]) as client:
        assert len(list(client.sample(sample_order))) == len(sample_order.sequences)
