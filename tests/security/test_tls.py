"""S3: peers without the right certificate are refused. S2: on which addresses servers listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from clients.jobs.client import DistillClient
from clients.teacher.client import TeacherClient
from protos.auth.tls import TlsFiles
from protos.errors import DistillError, InvalidInput, Unavailable
from protos.rpc.server import ServerEndpoint, read_endpoint, serve
from tests.security.conftest import Certificates, Secrets
from tests.security.processes import FAKE_TEACHER, Program, run_refused, server, teacher
from tests.security.test_access import CONFIG

SetEnv = Callable[..., None]


@pytest.fixture
def set_env(monkeypatch: pytest.MonkeyPatch) -> SetEnv:
    def set_all(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


@contextmanager
def guard_server(
    tmp_path: Path, tokens: Secrets, tls: tuple[object, ...]
) -> Iterator[tuple[Program, Path]]:
    runs = tmp_path / "runs"
    with server(runs, "--token-file", tokens.file, *tls) as program:
        yield program, runs


def submission_error(address: str) -> DistillError:
    """Return the error of a job that is submitted to `address`."""
    with DistillClient(address, timeout=2) as client, pytest.raises(Unavailable) as caught:
        client.submit(CONFIG)
    return caught.value


def has_no_job(runs: Path) -> bool:
    return not any(path.is_dir() for path in runs.iterdir())


def test_the_right_certificate_serves(
    tmp_path: Path, tokens: Secrets, certificates: Certificates, set_env: SetEnv
) -> None:
    set_env(DISTILL_TOKEN=tokens.submit, DISTILL_TLS_CA=certificates.pem("ca"))
    with guard_server(tmp_path, tokens, certificates.tls()) as (program, _):
        assert program.address.startswith("https://127.0.0.1:")
        with DistillClient(program.address) as client:
            assert client.list() == []
        with DistillClient(f"https://localhost:{program.port}") as client:
            assert client.list() == []


def test_clients_that_cannot_trust_a_server_send_it_nothing(
    tmp_path: Path, tokens: Secrets, certificates: Certificates, set_env: SetEnv
) -> None:
    set_env(DISTILL_TOKEN=tokens.submit)
    with guard_server(tmp_path, tokens, certificates.tls()) as (program, runs):
        for ca in (None, "foreign-ca"):
            if ca:
                set_env(DISTILL_TLS_CA=certificates.pem(ca))
            fault = submission_error(program.address)
            assert "CERTIFICATE_VERIFY_FAILED" in fault.message
            assert "DISTILL_TLS_CA" in fault.hint
        plain_address = program.address.removeprefix("https://")
        assert "cannot reach" in submission_error(plain_address).message
        assert has_no_job(runs)


@pytest.mark.parametrize("name", ["expired", "elsewhere", "foreign"])
def test_servers_that_nobody_should_trust(
    name: str, tmp_path: Path, tokens: Secrets, certificates: Certificates, set_env: SetEnv
) -> None:
    set_env(DISTILL_TOKEN=tokens.submit, DISTILL_TLS_CA=certificates.pem("ca"))
    with guard_server(tmp_path, tokens, certificates.tls(name)) as (program, runs):
        assert "certificate" in submission_error(program.address).hint
        assert has_no_job(runs)


def test_mutual_tls(
    tmp_path: Path, tokens: Secrets, certificates: Certificates, set_env: SetEnv
) -> None:
    set_env(DISTILL_TOKEN=tokens.submit, DISTILL_TLS_CA=certificates.pem("ca"))
    mutual = (*certificates.tls(), "--tls-client-ca", certificates.pem("ca"))
    with guard_server(tmp_path, tokens, mutual) as (program, runs):
        submission_error(program.address)
        set_env(
            DISTILL_TLS_CERT=certificates.pem("foreign"),
            DISTILL_TLS_KEY=certificates.key("foreign"),
        )
        submission_error(program.address)
        assert has_no_job(runs)
        set_env(
            DISTILL_TLS_CERT=certificates.pem("client"), DISTILL_TLS_KEY=certificates.key("client")
        )
        with DistillClient(program.address) as client:
            assert client.list() == []


def test_a_teacher_over_tls(
    tmp_path: Path, tokens: Secrets, certificates: Certificates, set_env: SetEnv
) -> None:
    set_env(DISTILL_TEACHER_TOKEN=tokens.read, DISTILL_TLS_CA=certificates.pem("ca"))
    options = ("--token-file", tokens.file, *certificates.tls())
    with teacher(tmp_path / "log", *options) as program:
        with TeacherClient(program.address) as client:
            assert client.info().vocab_size == 64
        plain_address = program.address.removeprefix("https://")
        with TeacherClient(plain_address) as client, pytest.raises(Unavailable):
            client.info()


def listening_addresses(program: Program) -> set[str]:
    process = psutil.Process(program.process.pid)
    connections = process.net_connections(kind="inet")
    addresses = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    # gRPC listens on IPv6 sockets for both families.
    return {"0.0.0.0" if ip == "::" else ip.removeprefix("::ffff:") for ip in addresses}


def test_servers_listen_on_loopback_by_default(tmp_path: Path) -> None:
    with server(tmp_path / "runs") as program:
        assert listening_addresses(program) == {"127.0.0.1"}
    with teacher(tmp_path / "log") as program:
        assert listening_addresses(program) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("distill_server", ("--runs", "unused")), ("teacher_service", FAKE_TEACHER)],
)
def test_programs_refuse_strangers(
    module: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    tokens: Secrets,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    options = (*arguments, "--host", "0.0.0.0", "--port", "0", "--token-file", tokens.file)
    error_text = run_refused(module, options, PYTHONPATH=root)
    assert "refusing to listen on 0.0.0.0" in error_text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_other_machines_need_token_and_tls(
    host: str, tokens: Secrets, certificates: Certificates
) -> None:
    tls = TlsFiles(certificates.pem("server"), certificates.key("server"))
    for token_file, files in ((None, TlsFiles()), (tokens.file, TlsFiles()), (None, tls)):
        with pytest.raises(InvalidInput, match="refusing to listen") as caught:
            read_endpoint(host, 0, token_file, files, insecure=False).require_usable()
        assert caught.value.field == "--host"
        read_endpoint(host, 0, token_file, files, insecure=True).require_usable()
    read_endpoint(host, 0, tokens.file, tls, insecure=False).require_usable()


def test_insecure_is_said_aloud(
    tmp_path: Path, tokens: Secrets, certificates: Certificates
) -> None:
    with server(tmp_path / "runs", "--host", "0.0.0.0", "--insecure") as program:
        assert listening_addresses(program) == {"0.0.0.0", "127.0.0.1"}, (
            "and its metrics on loopback"
        )
        assert "--insecure: other machines reach 0.0.0.0 with NO TOKEN and NO TLS" in (
            program.log.read_text()
        )
    options = ("--host", "0.0.0.0", "--token-file", tokens.file, *certificates.tls())
    with server(tmp_path / "others", *options) as program:
        assert "NO TOKEN" not in program.log.read_text()


def test_certificates_are_looked_at_before_anything_starts(
    tmp_path: Path, certificates: Certificates
) -> None:
    cert, key = certificates.pem("server"), certificates.key("server")
    empty_file = tmp_path / "empty"
    empty_file.touch()
    for files, field in (
        (TlsFiles(cert=cert), "--tls-key"),
        (TlsFiles(key=key), "--tls-cert"),
        (TlsFiles(client_ca=cert), "--tls-cert"),
        (TlsFiles(cert, certificates.key("client")), "--tls-cert"),
        (TlsFiles(empty_file, key), "--tls-cert"),
        (TlsFiles(cert, tmp_path / "none"), "--tls-key"),
        (TlsFiles(cert, key, empty_file), "--tls-client-ca"),
    ):
        with pytest.raises(InvalidInput) as caught:
            read_endpoint("127.0.0.1", 0, None, files, insecure=False)
        assert caught.value.field == field
    exposed_key = tmp_path / "exposed.key"
    exposed_key.write_bytes(key.read_bytes())
    exposed_key.chmod(0o644)
    with pytest.raises(InvalidInput, match="mode 644"):
        read_endpoint("127.0.0.1", 0, None, TlsFiles(cert, exposed_key), insecure=False)


def test_a_port_that_is_taken_and_a_host_that_is_not_ours() -> None:
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.1"):
        ServerEndpoint("192.0.2.1", 1, insecure=True).require_usable()
    endpoint = ServerEndpoint("192.0.2.1", 0, insecure=True)
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.1"):
        asyncio.run(serve(lambda _: "service", endpoint, grace_seconds=0, on_ready=print))
