"""Tokens and certificates that change while a server runs."""

from __future__ import annotations

import http.client
import re
import secrets
import shutil
import signal
import ssl
from pathlib import Path

import pytest

from clients.jobs.client import DistillClient
from clients.teacher.client import TeacherClient
from protos.errors import Unauthenticated
from tests.distill_server.conftest import eventually
from tests.security.conftest import Certificates, Secrets
from tests.security.processes import Program, server, teacher

REFUSAL = "its previous content stays valid"


def replace_file(path: Path, content: str | bytes) -> None:
    new_path = path.with_suffix(".new")
    new_path.touch(0o600)
    new_path.write_bytes(content.encode() if isinstance(content, str) else content)
    new_path.replace(path)


def http_port_of(program: Program) -> int:
    """Return the HTTP port, which the program prints after its address."""
    match = re.search(r"https?://127\.0\.0\.1:(\d+)$", program.output.readline())
    assert match
    return int(match[1])


def http_status(port: int, path: str, token: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_tokens_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_token, new_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    token_file = tmp_path / "tokens"
    replace_file(token_file, f"submit {old_token}\n")
    with server(tmp_path / "runs", "--token-file", token_file, "--dashboard", 0) as program:
        port = http_port_of(program)
        assert http_status(port, "/api/jobs", old_token) == 200
        monkeypatch.setenv("DISTILL_TOKEN", old_token)
        with DistillClient(program.address) as client:
            assert client.list() == []
            replace_file(token_file, f"read {new_token}\n")
            eventually(lambda: http_status(port, "/api/jobs", old_token) == 401)
            with pytest.raises(Unauthenticated):
                client.list()
        monkeypatch.setenv("DISTILL_TOKEN", new_token)
        with DistillClient(program.address) as client:
            assert client.list() == []
            # Damaged; and a quota that this server refuses at its start, too.
            for number, content in enumerate((f"submit {old_token} jobs", "", "quota")):
                lines = f"submit {old_token} owner=ann gpus=1\n" if content == "quota" else content
                replace_file(token_file, lines)
                eventually(lambda n=number: program.log.read_text().count(REFUSAL) == n + 1)
                assert client.list() == []
                assert http_status(port, "/api/jobs", old_token) == 401
            program.process.send_signal(signal.SIGHUP)
            eventually(lambda: program.log.read_text().count(REFUSAL) == 4)
            replace_file(token_file, f"read {old_token}\nread {new_token}\n")
            program.process.send_signal(signal.SIGHUP)
            eventually(lambda: http_status(port, "/api/jobs", old_token) == 200)
            assert client.list() == []
        text = program.log.read_text()
        assert old_token not in text
        assert new_token not in text


def test_tokens_of_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_token, new_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    token_file = tmp_path / "tokens"
    replace_file(token_file, f"read {old_token}\n")
    with teacher(tmp_path / "log", "--token-file", token_file, "--http-port", 0) as program:
        port = http_port_of(program)
        monkeypatch.setenv("DISTILL_TEACHER_TOKEN", old_token)
        with TeacherClient(program.address) as client:
            assert client.info().vocab_size == 64
        replace_file(token_file, f"read {new_token}\n")
        eventually(lambda: http_status(port, "/v1/models", old_token) == 401)
        assert http_status(port, "/v1/models", new_token) == 200
        with TeacherClient(program.address) as client, pytest.raises(Unauthenticated):
            client.info()


@pytest.mark.slow
def test_a_renewed_certificate(
    tmp_path: Path, tokens: Secrets, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ports serve it to new connections, and go on to require certificates of clients."""
    monkeypatch.setenv("DISTILL_TOKEN", tokens.submit)
    monkeypatch.setenv("DISTILL_TLS_CA", str(certificates.pem("ca")))
    monkeypatch.setenv("DISTILL_TLS_CERT", str(certificates.pem("client")))
    monkeypatch.setenv("DISTILL_TLS_KEY", str(certificates.key("client")))
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    shutil.copy(certificates.pem("server"), cert)
    shutil.copy(certificates.key("server"), key)
    options = ("--tls-client-ca", certificates.pem("ca"), "--dashboard", 0)
    arguments = ("--token-file", tokens.file, "--tls-cert", cert, "--tls-key", key, *options)
    with server(tmp_path / "runs", *arguments) as program:
        ports = (program.port, http_port_of(program))

        def served() -> set[str]:
            return {ssl.get_server_certificate(("127.0.0.1", port), timeout=60) for port in ports}

        assert served() == {certificates.pem("server").read_text()}
        with DistillClient(program.address) as client:
            assert client.list() == []
            replace_file(cert, certificates.pem("elsewhere").read_bytes())
            # Its key is still the old one.
            eventually(lambda: REFUSAL in program.log.read_text())
            assert served() == {certificates.pem("server").read_text()}
            replace_file(key, certificates.key("elsewhere").read_bytes())
            eventually(lambda: served() == {certificates.pem("elsewhere").read_text()})
            assert client.list() == [], "an open connection goes on"
        assert dashboard_status(ports[1], certificates, tokens, "client") == 200
        for own_certificate in ("", "foreign"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                dashboard_status(ports[1], certificates, tokens, own_certificate)


def dashboard_status(
    port: int, certificates: Certificates, tokens: Secrets, own_certificate: str
) -> int:
    context = ssl.create_default_context(cafile=certificates.pem("ca"))
    context.check_hostname = False
    if own_certificate:
        context.load_cert_chain(
            certificates.pem(own_certificate), certificates.key(own_certificate)
        )
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    try:
        connection.request("GET", "/api/jobs", headers={"Authorization": f"Bearer {tokens.read}"})
        return connection.getresponse().status
    finally:
        connection.close()
