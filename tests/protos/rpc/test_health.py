"""The health check of containers: a program whose exit code is the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protos.errors import InvalidInput
from protos.rpc.health import is_serving
from protos.rpc.ports import free_ports
from tests.security.conftest import Certificates, Secrets, certificates, no_secrets, tokens
from tests.teacher_service.http.asking import FAKE
from tests.teacher_service.processes import TeacherProcess

__all__ = ["certificates", "no_secrets", "tokens"]


def run_check(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "protos.rpc.health", address]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_server_with_tokens_and_tls(
    tmp_path: Path,
    certificates: Certificates,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = [str(word) for word in certificates.tls()]
    options = [*FAKE, "--no-cache", "--token-file", str(tokens.file), *tls]
    teacher = TeacherProcess(options, log=tmp_path / "log")
    try:
        address = f"https://localhost:{teacher.port}"
        assert not is_serving(address)  # the certificate authority is not public
        monkeypatch.setenv("DISTILL_TLS_CA", str(certificates.pem("ca")))
        assert is_serving(address)
        assert not is_serving(f"localhost:{teacher.port}", seconds=1)
        process = run_check(address)
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    finally:
        teacher.close()


def test_no_server() -> None:
    (port,) = free_ports(1)
    process = run_check(f"localhost:{port}")
    assert (process.returncode, process.stderr) == (1, f"localhost:{port} is not serving\n")


def test_no_port() -> None:
    process = run_check("localhost")
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert "has no port" in process.stderr
    with pytest.raises(InvalidInput):
        is_serving("ftp://localhost:1")
