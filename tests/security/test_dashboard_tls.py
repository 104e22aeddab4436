"""The dashboard requires a client certificate and a token, as the gRPC port does."""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Iterator

import pytest

from tests.security.conftest import Certificates, Secrets
from tests.security.processes import server


@pytest.fixture(scope="module")
def port(
    certificates: Certificates, tokens: Secrets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a dashboard that serves only clients with a certificate of `ca`."""
    options = ("--tls-client-ca", certificates.pem("ca"), "--dashboard", 0)
    runs = tmp_path_factory.mktemp("certified") / "runs"
    arguments = ("--token-file", tokens.file, *certificates.tls(), *options)
    with server(runs, *arguments) as program:
        match = re.fullmatch(
            r"dashboard at https://127\.0\.0\.1:(\d+)\n", program.output.readline()
        )
        assert match
        yield int(match[1])


def response_status(
    port: int, certificates: Certificates, *, ca: str = "ca", own_certificate: str, token: str
) -> int:
    """Return the HTTP status for a browser that trusts `ca` and shows `own_certificate`."""
    context = ssl.create_default_context(cafile=certificates.pem(ca))
    if own_certificate:
        context.load_cert_chain(
            certificates.pem(own_certificate), certificates.key(own_certificate)
        )
    connection = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", "/api/jobs", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_certified_browsers_are_served(
    port: int, certificates: Certificates, tokens: Secrets
) -> None:
    assert response_status(port, certificates, own_certificate="client", token=tokens.read) == 200
    assert response_status(port, certificates, own_certificate="client", token="") == 401


@pytest.mark.parametrize("own_certificate", ["", "foreign", "expired"])
def test_others_are_not(
    port: int, certificates: Certificates, tokens: Secrets, own_certificate: str
) -> None:
    """TLS 1.3 lets a client write before it is refused: the connection breaks without an answer."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        response_status(port, certificates, own_certificate=own_certificate, token=tokens.read)


def test_a_browser_finds_a_server_out(
    port: int, certificates: Certificates, tokens: Secrets
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        response_status(
            port, certificates, ca="foreign-ca", own_certificate="client", token=tokens.read
        )


def test_there_is_no_way_around_tls(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        connection.getresponse()
    connection.close()
