"""The metrics page of a service, read with http.client."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from protos.errors import InvalidInput
from protos.rpc import metrics_page as module
from protos.rpc.metrics_page import MetricsPage, metrics_page


@contextmanager
def serve_page(page: MetricsPage) -> Iterator[int]:
    with metrics_page(page, ("127.0.0.1", 0)):
        yield int(page.address.rpartition(":")[2])


def get_page(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_service_is_alive_and_then_ready(caplog: pytest.LogCaptureFixture) -> None:
    page = MetricsPage(CollectorRegistry())
    with serve_page(page) as port:
        assert get_page(port, "/healthz") == (200, "ok\n")
        assert get_page(port, "/readyz") == (503, "not ready\n")
        with caplog.at_level("INFO", "protos.rpc.metrics_page"):
            page.start()
        assert caplog.messages == [f"metrics at http://127.0.0.1:{port}/metrics"]
        assert get_page(port, "/readyz") == (200, "ok\n")
        page.stop()
        assert get_page(port, "/readyz") == (503, "not ready\n")
        status, text = get_page(port, "/metrics")
        assert status == 200
        assert "process_start_time_seconds " in text
        assert get_page(port, "/")[0] == get_page(port, "/metrics/x")[0] == 404


def test_answers_come_from_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running event loop answers; one that hangs or is closed is not alive."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    page = MetricsPage(CollectorRegistry())
    page.ready = True
    hanging, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    silent = (503, "the service does not answer\n")
    with serve_page(page) as port:
        for loop in (hanging, closed):
            page.follow(loop)
            assert get_page(port, "/healthz") == get_page(port, "/readyz") == silent
            assert get_page(port, "/metrics") == silent
    hanging.close()

    async def answer() -> None:
        page.follow(asyncio.get_running_loop())
        with serve_page(page) as port:
            assert await asyncio.to_thread(get_page, port, "/healthz") == (200, "ok\n")

    monkeypatch.undo()
    asyncio.run(answer())


def test_the_page_ends_at_once() -> None:
    """The page closes although its thread waits without a timeout; its port is free afterwards."""
    with serve_page(MetricsPage(CollectorRegistry())) as port:
        [thread] = [thread for thread in threading.enumerate() if thread.name == "metrics"]
    assert not thread.is_alive()
    with metrics_page(MetricsPage(CollectorRegistry()), ("127.0.0.1", port)):
        pass


def test_a_taken_port() -> None:
    with serve_page(MetricsPage(CollectorRegistry())) as port:
        page = metrics_page(MetricsPage(CollectorRegistry()), ("127.0.0.1", port))
        with pytest.raises(InvalidInput, match="--metrics-port: cannot listen on"), page:
            pass
