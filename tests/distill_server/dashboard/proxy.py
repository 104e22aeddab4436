"""A reverse proxy that serves a dashboard under a prefix, as nginx does; standard library only."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "/distill"
# Headers of the connection, not of the message (hop-by-hop).
_HOP = {"connection", "transfer-encoding", "keep-alive", "server", "date"}


class _Handler(BaseHTTPRequestHandler):
    upstream: int

    def do_GET(self) -> None:
        self.forward()

    def do_POST(self) -> None:
        self.forward()

    def forward(self) -> None:
        if not self.path.startswith(f"{PREFIX}/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        # Either side may disconnect, the server also in the middle of a stream.
        ignore_disconnects = contextlib.suppress(ConnectionError, http.client.HTTPException)
        with contextlib.closing(connection), ignore_disconnects:
            # The name that the browser used, as with `proxy_set_header Host $host`.
            connection.request(
                self.command, self.path.removeprefix(PREFIX), body, dict(self.headers)
            )
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.end_headers()
            # An event stream has no end: forward each piece as it arrives.
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def proxy(upstream: int) -> Iterator[int]:
    """Run a proxy for the dashboard at port `upstream`; yield the proxy's port."""
    handler = type("Handler", (_Handler,), {"upstream": upstream})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
