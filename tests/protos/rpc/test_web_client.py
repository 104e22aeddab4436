"""Requests to somebody else's server, with a real proxy server that counts what reaches it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from protos.errors import Corrupt, InvalidInput, Unavailable
from protos.rpc import web_client
from protos.rpc.transport import backoff
from protos.rpc.web_client import WebAnswer, WebClient, find_proxy, parse_web_address

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class CountingServer(ThreadingHTTPServer):
    """Answers every request with `{}` of its next status, and notes its target and its key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: CountingServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers["Authorization"]))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def serve_counting() -> Iterator[CountingServer]:
    with CountingServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target() -> Iterator[CountingServer]:
    yield from serve_counting()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingServer]:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("KEY", "secret")
    yield from serve_counting()


def post(url: str, **options: Any) -> WebAnswer:
    settings: dict[str, Any] = {"attempts": 2, "answer_seconds": 30.0, "connections": 4}

    async def send() -> WebAnswer:
        address = parse_web_address(url, "--endpoint")
        values = settings | {"max_bytes": 1 << 20, "key_variable": "KEY"} | options
        async with WebClient(address, **values) as client:
            return await client.request("POST", "/v1", {"prompt": "text"})

    return asyncio.run(send())


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_no_proxy_sees_what_goes_to_this_machine(
    target: CountingServer, proxy: CountingServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, proxy.url)
    assert post(target.url).body == b"{}"
    assert target.requests == [("/v1", "Bearer secret")]
    assert not proxy.requests
    assert post("http://model.example:8000").status == 200  # no such name, but the proxy answers
    assert proxy.requests == [("http://model.example:8000/v1", "Bearer secret")]
    monkeypatch.setenv("NO_PROXY", "model.example")
    with pytest.raises(Unavailable, match=r"http://model.example:8000/v1 cannot be reached: "):
        post("http://model.example:8000")
    assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    ("variables", "url", "expected"),
    [
        ({"http_proxy": "http://p:1"}, "http://[::1]:80", None),
        ({"http_proxy": "http://p:1"}, "http://localhost:80", None),
        ({"http_proxy": "p:1"}, "http://host", "http://p:1"),
        ({"http_proxy": "http://p:1"}, "https://host", None),
        ({"https_proxy": "http://p:1", "ALL_PROXY": "http://q:1"}, "https://host", "http://p:1"),
        ({"all_proxy": "http://q:1", "no_proxy": "*"}, "https://host", None),
    ],
)
@pytest.mark.usefixtures("proxy")
def test_the_proxy_of_an_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, expected: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_proxy(parse_web_address(url, "")) == expected


@pytest.mark.usefixtures("proxy")
def test_a_proxy_is_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:password@127.0.0.1:{port}")
    with pytest.raises(Unavailable, match=f"through the proxy http://127.0.0.1:{port}: ") as caught:
        post("http://model.example")
    assert "password" not in str(caught.value)
    monkeypatch.setenv("HTTP_PROXY", "ftp://proxy")
    with pytest.raises(InvalidInput, match=r"correct HTTP_PROXY, .* or set NO_PROXY=model.example"):
        post("http://model.example")


@pytest.mark.usefixtures("proxy")
def test_temporary_statuses_are_retried(target: CountingServer) -> None:
    target.statuses = [503]
    assert post(target.url).status == 200
    target.statuses = [400]
    assert post(target.url).status == 400
    target.statuses = [429, 500]
    assert post(target.url).status == 500
    assert len(target.requests) == 2 + 1 + 2


@pytest.mark.usefixtures("proxy")
def test_an_endless_answer_is_not_read(target: CountingServer) -> None:
    with pytest.raises(Corrupt, match="is longer than 0 MiB"):
        post(target.url, max_bytes=1)


def test_pauses_double_up_to_the_longest() -> None:
    state = random.getstate()
    for failures, expected in ((1, 0.25), (2, 0.5), (5, 4.0), (99, 10.0), (10**6, 10.0)):
        pauses = [backoff(failures, 0.25, 10.0) for _ in range(200)]
        assert expected / 2 <= min(pauses) < 0.6 * expected
        assert 0.9 * expected < max(pauses) <= expected
    assert random.getstate() == state, "others draw from the global generator"
