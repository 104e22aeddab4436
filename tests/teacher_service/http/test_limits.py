"""Clients that vanish, do not read, send slowly or too much; the teacher goes on without them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from protos.errors import Overloaded
from teacher_service.http.app import MAX_BODY_BYTES
from teacher_service.http.clients import MAX_BODIES_BYTES, HttpClients
from teacher_service.serving.answer_budget import AnswerBudget
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.http.asking import FAKE, Site, tokens
from tests.teacher_service.http.impatient import CONNECTIONS, PATIENCE
from tests.teacher_service.processes import TeacherProcess
from tests.trickling import trickling

PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
# A row of this model is answered in 8 KB, a sequence in 4 MB.
LARGE = ("--engine", "fake", "--model", "vocab=300,max_length=600", "--max-top-k", "200")
LARGE = (*LARGE, "--http-port", "0")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("limits")
    teacher = TeacherProcess(
        [*LARGE, "--no-cache"], log=folder / "log", module="tests.teacher_service.http.impatient"
    )
    yield Site(teacher)
    teacher.close()


def request(prompts: Any, k: int = 2) -> bytes:
    fields = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": k}
    return json.dumps(fields).encode()


def posted(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def hung_up(connection: socket.socket) -> bool:
    """Whether the server ends the connection, after whatever it answers."""
    connection.settimeout(20)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def refused(site: Site, head: bytes) -> bytes:
    """The answer to the head of a request."""
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.settimeout(20)
        connection.sendall(head)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(1 << 16)
        return answer


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def total(site: Site, code: str) -> int:
    name = f'distill_teacher_requests_total{{code="{code}"}} '
    text = site.ask("/metrics").body.decode()
    return int(float(next(x for x in text.splitlines() if x.startswith(name)).split()[-1]))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        HEAD[:20],
        HEAD,
        HEAD + b"Content-Length: 90\r\n\r\n{",
        HEAD + b"X: " + b"y" * 1_000_000,
    ],
    ids=["silence", "half a line", "half a head", "half a body", "an endless head"],
)
def test_half_a_request_is_not_waited_for(site: Site, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request_bytes)
        assert hung_up(connection)
    assert site.ask(PATH, request([1, 2])).status == 200


def test_a_body_that_trickles_in_is_cut(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        request_bytes = HEAD + b"Content-Length: 9999\r\n\r\n" + b" " * 999
        with trickling(connection, request_bytes, PATIENCE / 500):
            assert hung_up(connection)


def test_a_body_that_is_too_large_is_not_read(site: Site) -> None:
    answer = refused(site, HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"send fewer sequences" in answer


def test_a_length_beside_chunks_is_not_believed(site: Site) -> None:
    """The chunks would count, which may have any number of bytes."""
    answer = refused(site, HEAD + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Transfer-Encoding: the body comes in chunks" in answer


def test_a_body_of_unknown_length_is_not_read(site: Site) -> None:
    answer = refused(site, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Length: the header is missing" in answer


def test_rows_that_one_client_may_not_have_at_once(site: Site) -> None:
    prompts = [tokens(600)] * 140
    answer = site.ask(PATH, request(prompts, 200))
    assert answer.status == 400
    assert "MiB, but the limit is 256 MiB" in answer.json()["error"]["message"]


def test_a_reader_that_does_not_read_is_dropped(site: Site) -> None:
    """It gets some of an answer of 100 MB, and no connection, nor memory, for ever."""
    before = total(site, "OK")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", site.port))
        connection.sendall(posted(request([tokens(600)] * 25, 200)))
        eventually(lambda: total(site, "OK") == before + 25)
        eventually(lambda: not is_open(site, connection.getsockname()[1]))
    assert site.ask(PATH, request([1, 2])).status == 200


def test_clients_that_read_nothing_share_one_budget(start_teacher: StartTeacher) -> None:
    """16 answers have 54 MB of rows each; a client may have half of 512 MiB."""
    site = Site(start_teacher(*LARGE, launched=True))
    process = psutil.Process(site.teacher.process.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for client in range(16):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", site.port))
            prompts = [tokens(600, seed=100 * client + number) for number in range(25)]
            connection.sendall(posted(request(prompts, 200)))
        eventually(lambda: total(site, "OK") >= 5 * 25)
        # After five, the share has no room; other clients are answered meanwhile.
        other_headers = {"Authorization": "Basic of another client"}
        for _ in range(20):
            assert site.ask(PATH, request([1, 2]), headers=other_headers).status == 200
        assert total(site, "OK") <= 5 * 25 + 20
        more = process.memory_info().rss - before
    print(f"{more >> 20} MiB more")
    assert more < 400 << 20


def is_open(site: Site, port: int) -> bool:
    """Whether the server's end is there, by the kernel's table."""
    ports = (f":{site.port:04X}", f":{port:04X}")
    for line in Path(f"/proc/{site.teacher.process.pid}/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if local.endswith(ports[0]) and remote.endswith(ports[1]) and state == "01":
            return True
    return False


def test_there_are_never_too_many_connections(site: Site) -> None:
    idle = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(CONNECTIONS + 10)]
    try:
        assert all(hung_up(connection) for connection in idle)
    finally:
        for connection in idle:
            connection.close()

    def answered() -> bool:
        with contextlib.suppress(OSError):
            return site.ask(PATH, request([1, 2])).status == 200
        return False

    eventually(answered)


def test_the_queries_of_a_client_that_vanishes_leave_the_queue(
    start_teacher: StartTeacher,
) -> None:
    site = Site(start_teacher(*LARGE, "--max-batch-tokens", "600"))
    slow = Site(start_teacher(*with_latency(LARGE, 300), "--max-batch-tokens", "600"))
    assert site.url != slow.url
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(posted(request([tokens(600, seed=seed) for seed in range(50)])))
        eventually(lambda: slow.scored_tokens() > 0)
    eventually(lambda: total(slow, "CANCELLED") > 40)
    scored_count = slow.scored_tokens()
    assert slow.ask(PATH, request([1, 2])).status == 200
    # What the engine had begun, and this request.
    assert slow.scored_tokens() <= scored_count + 2 * 599 + 1


def with_latency(options: tuple[str, ...], milliseconds: int) -> list[str]:
    return [
        f"{option},latency_ms={milliseconds}" if "vocab" in option else option for option in options
    ]


def test_sigterm_lets_requests_end(start_teacher: StartTeacher) -> None:
    site = Site(start_teacher(*with_latency(FAKE, 500)))
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(site.ask(PATH, request(tokens(60))).status)
    )
    asking.start()
    # In its batch, which takes half a second.
    eventually(lambda: b"distill_teacher_queued_tokens" in site.ask("/metrics").body)
    time.sleep(0.2)
    site.teacher.send(signal.SIGTERM)
    asking.join()
    assert answers == [200]
    assert site.teacher.process.wait(30) == 0
    with pytest.raises(OSError, match="refused"):
        site.ask("/health")


def test_a_broken_engine_is_said(start_teacher: StartTeacher) -> None:
    """The self-test scores three batches."""
    model = [f"{option},raise_after=3" if "vocab" in option else option for option in FAKE]
    site = Site(start_teacher(*model))
    statuses = []
    with contextlib.suppress(OSError):
        for seed in range(20):
            statuses.append(site.ask(PATH, request(tokens(60, seed))).status)
    assert set(statuses) <= {500, 503}
    assert site.teacher.process.wait(30) == 1


def scope(host: str, token: str = "") -> dict[str, Any]:
    return {"type": "http", "client": (host, 5), "headers": [(b"authorization", token.encode())]}


def test_the_connections_of_a_client_share_its_turn() -> None:
    callers = HttpClients(AnswerBudget())
    with callers.enter(scope("10.0.0.1", "a"), 0) as first:
        with (
            callers.enter(scope("10.0.0.1", "a"), 0) as same,
            callers.enter(scope("10.0.0.1", "b"), 0) as other_token,
            callers.enter(scope("10.0.0.2", "a"), 0) as other_host,
        ):
            assert same.sender is first.sender
            assert (
                len({id(http_client.sender) for http_client in (first, other_token, other_host)})
                == 3
            )
            assert callers.requests == 4
        assert callers.requests == 1
    assert callers.requests == 0


def test_bodies_are_bounded() -> None:
    callers = HttpClients(AnswerBudget())
    with callers.enter(scope("a"), MAX_BODIES_BYTES - 10):
        with pytest.raises(Overloaded, match="MiB"), callers.enter(scope("b"), 11):
            pass
        with callers.enter(scope("b"), 10):
            pass
    with callers.enter(scope("b"), MAX_BODIES_BYTES):
        pass


def test_an_answer_waits_for_the_memory_of_the_ones_before() -> None:
    async def run() -> list[str]:
        order: list[str] = []
        with HttpClients(AnswerBudget(100)).enter(scope("a"), 0) as caller:

            async def answer(name: str, size: int) -> None:
                async with caller.reserve_memory(size):
                    order.append(f"{name} has room")
                    await asyncio.sleep(0.01)
                    order.append(f"{name} ends")

            # An answer that is alone has room, whatever its size.
            await asyncio.gather(answer("first", 60), answer("second", 500), answer("third", 10))
            assert caller.share.bytes == 0
        return order

    names = ("first", "second", "third")
    assert asyncio.run(run()) == [
        f"{name} {what}" for name in names for what in ("has room", "ends")
    ]
