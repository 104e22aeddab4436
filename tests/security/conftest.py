from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks
from tests.security.processes import Program, server, teacher

DOCUMENT = ROOT / "docs" / "security.md"


@dataclass(frozen=True)
class Secrets:
    """A token of each role, and the file with all of them."""

    file: Path
    read: str
    submit: str
    admin: str


@dataclass(frozen=True)
class Certificates:
    """A directory of NAME.pem and NAME.key; `ca` signed all but the foreign ones."""

    path: Path

    def pem(self, name: str) -> Path:
        return self.path / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.path / f"{name}.key"

    def tls(self, name: str = "server") -> tuple[object, ...]:
        return ("--tls-cert", self.pem(name), "--tls-key", self.key(name))


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the DISTILL_ variables of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("DISTILL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    token_by_role = {role: secrets.token_urlsafe(32) for role in ("read", "submit", "admin")}
    file.touch(0o600)
    file.write_text("".join(f"{role} {token}\n" for role, token in token_by_role.items()))
    return Secrets(file, **token_by_role)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates made with the commands of docs/security.md, and some untrusted ones."""
    path = tmp_path_factory.mktemp("certificates")
    (commands,) = blocks("docs/security.md", "certificates")
    _run_commands(commands.body, path)
    request = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    _run_commands(
        f"""
        {request} -x509 -days 9 -keyout foreign-ca.key -out foreign-ca.pem
        {request} -x509 -days 9 -keyout foreign.key -out foreign.pem -addext {names} \\
            -CA foreign-ca.pem -CAkey foreign-ca.key
        {request} -x509 -days 9 -keyout elsewhere.key -out elsewhere.pem \\
            -addext subjectAltName=DNS:elsewhere.example -CA ca.pem -CAkey ca.key
        {request} -keyout expired.key -out expired.csr -addext {names}
        openssl x509 -req -in expired.csr -copy_extensions copy -days -1 -out expired.pem \\
            -CA ca.pem -CAkey ca.key -CAcreateserial
        """,
        path,
    )
    return Certificates(path)


def _run_commands(commands: str, directory: Path) -> None:
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=directory, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory, tokens: Secrets) -> Iterator[Program]:
    runs = tmp_path_factory.mktemp("guarded") / "runs"
    with server(runs, "--token-file", tokens.file) as program:
        yield program


@pytest.fixture(scope="module")
def guarded_teacher(tmp_path_factory: pytest.TempPathFactory, tokens: Secrets) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("guarded") / "teacher.log"
    with teacher(log, "--token-file", tokens.file) as program:
        yield program
