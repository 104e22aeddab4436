"""Clients that send or read nothing are disconnected; the server shuts down despite them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protos.rpc.http_server import HttpLimits
from tests.distill_server.conftest import eventually
from tests.distill_server.dashboard.site import Site
from tests.trickling import trickling

PATIENCE = 1.0
MAX_CONNECTIONS = HttpLimits().connections
REQUEST = b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("limits") / "runs", patience=PATIENCE)
    yield site
    site.clean_up()


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the server closes the connection, after any answer."""
    connection.settimeout(20)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        REQUEST[:20],
        REQUEST,
        b"POST /api/jobs/x/cancel HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
        REQUEST + b"X: " + b"y" * 1_000_000,
    ],
    ids=["silence", "half a line", "half a request", "half a body", "an endless head"],
)
def test_half_a_request_is_not_waited_for(site: Site, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request_bytes)
        assert is_hung_up(connection)


def test_half_of_a_second_request_is_not_waited_for_either(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.sendall(REQUEST + b"\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(REQUEST)
        assert is_hung_up(connection)


def test_a_request_that_trickles_in_is_cut(site: Site) -> None:
    with (
        socket.create_connection(("127.0.0.1", site.port)) as connection,
        trickling(connection, REQUEST * 100, PATIENCE / 10),
    ):
        assert is_hung_up(connection)


def test_a_reader_that_does_not_read_is_dropped(site: Site) -> None:
    job = site.submit(name="pause=0.2", max_steps=2000)
    path = site.runs / job / "logs" / "attempt-1" / "rank-0.log"
    eventually(lambda: path.exists() and site.job(job)["step"] >= 1)
    # Few lines, but far more bytes than any buffer between server and client holds.
    with path.open("a") as log:
        log.write(("x" * 100_000 + "\n") * 400)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", site.port))
        connection.sendall(f"GET /api/jobs/{job}/log HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually(lambda: not is_open(site, connection.getsockname()[1]))
    assert site.ask("/api/jobs").status == 200


def is_open(site: Site, port: int) -> bool:
    """Whether the server's end of the connection is open, according to the kernel's table."""
    ports = (f":{site.port:04X}", f":{port:04X}")
    for line in Path(f"/proc/{site.process.pid}/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if local.endswith(ports[0]) and remote.endswith(ports[1]) and state == "01":
            return True
    return False


def test_there_are_never_too_many_connections(make_site: Callable[..., Site]) -> None:
    site = make_site(patience=60.0)
    idle = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(MAX_CONNECTIONS + 20)]
    try:
        # Connections over the limit are closed at once, long before the patience is over.
        assert all(is_hung_up(connection) for connection in idle[-20:])
        for connection in idle[:5]:
            connection.close()

        def is_answered() -> bool:
            try:
                return site.ask("/api/jobs").status == 200
            except OSError:
                return False

        eventually(is_answered)
    finally:
        for connection in idle:
            connection.close()


def test_readers_do_not_hold_up_the_end(make_site: Callable[..., Site]) -> None:
    site = make_site()
    job = site.submit(name="pause=0.05", max_steps=2000)
    feeds = [site.messages(f"/api/jobs/{job}/{feed}") for feed in ("events", "log", "events")]
    for feed in feeds:
        assert next(feed)[0] in ("extremes", "text")
    assert site.stop() == 0
    # Each feed ended as a complete answer: a broken one would raise here.
    for feed in feeds:
        assert {kind for kind, _, _ in feed} <= {"extremes", "steps", "text", "fault"}
    log_text = site.log.read_text()
    assert "Traceback" not in log_text
    assert "Cancel" not in log_text
