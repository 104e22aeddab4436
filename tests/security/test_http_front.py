"""The HTTP front of a teacher requires a client certificate and a token, as its gRPC port does."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
from collections.abc import Iterator

import pytest

from protos.auth.scoped_token import scoped_token
from tests.security.conftest import Certificates, Secrets
from tests.security.processes import Program, teacher

BODY = b'{"prompt": [1, 2], "max_tokens": 1, "prompt_logprobs": 2}'
REQUESTS = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
    ("GET", "/no/such/page"),
]


def http_port(program: Program) -> int:
    match = re.fullmatch(r"HTTP on https?://127\.0\.0\.1:(\d+)\n", program.output.readline())
    assert match
    return int(match[1])


@pytest.fixture(scope="module")
def port(tokens: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    log = tmp_path_factory.mktemp("http") / "log"
    with teacher(log, "--token-file", tokens.file, "--http-port", 0) as program:
        yield http_port(program)


def response_status(
    connection: http.client.HTTPConnection, method: str, path: str, authorization: str = ""
) -> int:
    try:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": authorization} if authorization else {}
        connection.request(method, path, BODY if method == "POST" else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def plain_connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=20)


def basic_credentials(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_pages_need_a_token(port: int, tokens: Secrets, method: str, path: str) -> None:
    connection = plain_connection(port)
    connection.request(method, path, BODY if method == "POST" else None)
    answer = connection.getresponse()
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert b"Authorization: Bearer TOKEN" in answer.read()
    connection.close()
    for token in (tokens.read, tokens.submit, tokens.admin):
        assert response_status(plain_connection(port), method, path, f"Bearer {token}") not in (
            401,
            403,
        )


def test_probes_need_no_token(port: int) -> None:
    assert response_status(plain_connection(port), "GET", "/health") == 200


def test_the_token_of_an_attempt(port: int, tokens: Secrets) -> None:
    scoped = scoped_token(tokens.submit, "job-1", 2)
    assert (
        response_status(plain_connection(port), "POST", "/v1/completions", f"Bearer {scoped}")
        == 200
    )
    rollouts = scoped_token(tokens.admin, "job-1", 2, rollouts=True)
    assert (
        response_status(plain_connection(port), "POST", "/v1/completions", f"Bearer {rollouts}")
        == 401
    )


def test_the_token_in_the_address_of_a_client(port: int, tokens: Secrets) -> None:
    """requests and aiohttp send the password of http://any:TOKEN@host as Basic credentials."""
    path = "/v1/completions"
    assert (
        response_status(plain_connection(port), "POST", path, basic_credentials("any", tokens.read))
        == 200
    )
    assert (
        response_status(plain_connection(port), "POST", path, basic_credentials("", tokens.read))
        == 200
    )
    for credentials in (
        basic_credentials(tokens.read, ""),
        basic_credentials("any", tokens.read[:-1]),
        basic_credentials("any", tokens.read + ":"),
        "Basic " + tokens.read,
        "Basic !",
        f"Bearer {tokens.read[:-1]}",
        f"Bearer {tokens.read * 100}",
        tokens.read,
    ):
        assert response_status(plain_connection(port), "POST", path, credentials) == 401


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost:80", 200), ("[::1]:9", 200), ("evil.example", 403), ("", 403)],
)
def test_names_that_others_lead_here_are_refused(port: int, host: str, expected: int) -> None:
    connection = plain_connection(port)
    connection.request("GET", "/health", headers={"Host": host})
    assert connection.getresponse().status == expected
    connection.close()


def test_without_tokens_everybody_of_this_machine_is_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with teacher(tmp_path_factory.mktemp("open") / "log", "--http-port", 0) as program:
        port = http_port(program)
        assert response_status(plain_connection(port), "POST", "/v1/completions") == 200
        # A client may send unrequested credentials, for instance from a .netrc file.
        assert (
            response_status(
                plain_connection(port), "POST", "/v1/completions", basic_credentials("a", "b")
            )
            == 200
        )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
    ],
)
def test_web_pages_are_refused(
    port: int, tokens: Secrets, headers: dict[str, str], status: int
) -> None:
    """A page of another site may send text/plain to this machine without asking first."""
    connection = plain_connection(port)
    headers = {"Authorization": f"Bearer {tokens.read}", **headers}
    connection.request("POST", "/v1/completions", BODY, headers)
    assert connection.getresponse().status == status
    connection.close()


@pytest.fixture(scope="module")
def certified_port(
    certificates: Certificates, tokens: Secrets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    options = ("--tls-client-ca", certificates.pem("ca"), "--http-port", 0)
    arguments = ("--token-file", tokens.file, *certificates.tls(), *options)
    with teacher(tmp_path_factory.mktemp("certified") / "log", *arguments) as program:
        yield http_port(program)


def status_over_tls(
    port: int, certificates: Certificates, own_certificate: str, token: str, ca: str = "ca"
) -> int:
    context = ssl.create_default_context(cafile=certificates.pem(ca))
    if own_certificate:
        context.load_cert_chain(
            certificates.pem(own_certificate), certificates.key(own_certificate)
        )
    connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    return response_status(connection, "POST", "/v1/completions", f"Bearer {token}")


def test_certified_clients_are_served(
    certified_port: int, certificates: Certificates, tokens: Secrets
) -> None:
    assert status_over_tls(certified_port, certificates, "client", tokens.read) == 200
    assert status_over_tls(certified_port, certificates, "client", "x") == 401


@pytest.mark.parametrize("own_certificate", ["", "foreign", "expired"])
def test_others_are_not(
    certified_port: int, certificates: Certificates, tokens: Secrets, own_certificate: str
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        status_over_tls(certified_port, certificates, own_certificate, tokens.read)


def test_there_is_no_way_around_tls(certified_port: int) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        response_status(plain_connection(certified_port), "GET", "/health")
