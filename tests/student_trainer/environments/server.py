"""A retrieval server with the protocol of Search-R1 and scripted faults, and a server that never
ends an answer.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class Library:
    """Answers by query; `faults`: HTTP statuses, or bodies, of the next answers."""

    texts: Mapping[str, list[str]]
    faults: list[int | bytes] = field(default_factory=list)
    poison: str = "poison"
    questions: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, question: dict[str, Any]) -> tuple[int, bytes]:
        self.questions.append(question)
        if self.faults:
            fault = self.faults.pop(0)
            return (fault, b"") if isinstance(fault, int) else (200, fault)
        if path != "/retrieve" or self.poison in question["queries"]:
            return 500, b"Internal Server Error"
        result: list[list[Any]] = []
        for query in question["queries"]:
            texts = self.texts.get(query, [])[: question["topk"] or 10]
            documents = [{"id": str(i), "contents": text} for i, text in enumerate(texts)]
            scored_documents = [
                {"document": d, "score": 1.0 / (i + 1)} for i, d in enumerate(documents)
            ]
            result.append(scored_documents if question["return_scores"] else documents)
        return 200, json.dumps({"result": result}).encode()


@contextmanager
def serve(library: Library) -> Iterator[str]:
    """Serve `library` on this machine, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            status, body = library.answer(self.path, json.loads(self.rfile.read(length)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serve_drips(text: bytes) -> Iterator[str]:
    """Yield the address of a server that answers with `text` at once, and then sends one byte at a
    time until the client disconnects.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=_drip, args=(server, text))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _drip(server: socket.socket, text: bytes) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            with client, suppress(OSError):
                client.sendall(text)
                while True:
                    client.sendall(b" ")
                    time.sleep(0.01)
