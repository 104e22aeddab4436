"""A client that sends one byte at a time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def trickling(connection: socket.socket, data: bytes, pause: float) -> Iterator[None]:
    """Send `data` in a thread, a byte each `pause` seconds, until the context ends."""
    stop = threading.Event()

    def send_bytes() -> None:
        for byte in data:
            if stop.wait(pause):
                return
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return

    sender = threading.Thread(target=send_bytes)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join()
