"""A second network namespace that stands for another machine: its link can be cut."""

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
        """Return a command line that runs `words` in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]

    def set_link(self, state: str) -> None:
        """Set the link `up` or `down`. While it is down, packets are lost without an error."""
        _run_ip("link", "set", self._link, state)

    def make(self) -> None:
        _run_ip("netns", "add", self.name)
        _run_ip(
            "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name
        )
        _run_ip("addr", "add", f"{self.here}/24", "dev", self._link)
        _run_ip("link", "set", self._link, "up")
        for words in (f"addr add {self.there}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run_ip("-n", self.name, *words.split())

    def remove(self) -> None:
        with suppress(subprocess.CalledProcessError):
            _run_ip("link", "delete", self._link)
        with suppress(subprocess.CalledProcessError):
            _run_ip("netns", "delete", self.name)


@contextmanager
def namespace() -> Iterator[Namespace]:
    """A namespace for one test; skips the test where the system does not allow namespaces."""
    test_namespace = Namespace(f"d{os.getpid() % 1_000_000}", os.getpid() % 250)
    try:
        test_namespace.make()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        test_namespace.remove()
        pytest.skip(f"no network namespaces: {error}")
    try:
        yield test_namespace
    finally:
        test_namespace.remove()


def _run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
