"""A network namespace beside that of the tests, as another machine: its link can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest


class Namespace:
    """`here` and `there` are the addresses of the two ends of its link."""

    def __init__(self, name: str, subnet: int) -> None:
        self.name = name
        self._link = f"v{name}"
        self.here, self.there = f"10.213.{subnet}.1", f"10.213.{subnet}.2"

    def command(self, *words: str) -> list[str]:
        """A command line that runs there."""
        return ["ip", "netns", "exec", self.name, *words]

    def set_link(self, state: str) -> None:
        """`up` or `down`: nothing that is sent arrives, and nobody is told."""
        _ip("link", "set", self._link, state)

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self.here}/24", "dev", self._link)
        _ip("link", "set", self._link, "up")
        for words in (f"addr add {self.there}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _ip("-n", self.name, *words.split())

    def remove(self) -> None:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._link)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", self.name)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """A namespace for the length of a test, which is skipped where the system allows none."""
    made = Namespace(f"d{os.getpid() % 1_000_000}", os.getpid() % 250)
    try:
        made.make()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        made.remove()
        pytest.skip(f"no network namespaces: {error}")
    try:
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
