"""Errors of model names: a hub that cannot answer now is no fault of the name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clients.data import hub
from clients.data.hub import find_on_hub
from clients.data.models.shape import config_file
from clients.data.records import DataSet
from protos.errors import DistillError, InvalidInput, Unavailable
from protos.rpc.ports import free_ports

HUB_ID = "someone/no-such-model"


@contextmanager
def serve_status(status: int) -> Iterator[str]:
    """Serve a hub that answers every request with this status; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def use_hub(address: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored after the test
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "_is_offline_by_choice", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.parametrize(
    ("status", "error_class", "reply"),
    [
        (404, InvalidInput, "returns no such model"),
        (401, InvalidInput, "returns no such model"),
        (429, Unavailable, "does not answer"),
        (503, Unavailable, "does not answer"),
        (None, Unavailable, "does not answer"),
    ],
)
def test_an_outage_of_the_hub_is_no_error_of_the_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
    error_class: type[DistillError],
    reply: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with serve_status(status or 200) as address:
        if status is None:
            address = f"http://127.0.0.1:{free_ports(1)[0]}"
        use_hub(address, monkeypatch, tmp_path)
        with pytest.raises(OSError, match=f"no directory {HUB_ID}, and the hub {reply}") as caught:
            find_on_hub(HUB_ID)
        error = hub.hub_error(caught.value, "text", field="student.model", hint="")
        assert type(error) is error_class
        with pytest.raises(error_class, match=r"student.model: no config.json of"):
            config_file(HUB_ID)
        if status is None:  # other replies are repeated for a minute
            with pytest.raises(error_class, match=r"data.path: cannot load the data set"):
                list(DataSet(HUB_ID).rows(["text"]))


def test_a_choice_to_work_offline_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_is_offline_by_choice", True)
    assert not hub.is_outage(ConnectionError("offline"))
