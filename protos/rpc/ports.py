"""Chooses ports of this machine for programs that start later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20_000  # below are well-known services, and the workers of Ray (10,002 to 19,999)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports of `host`, "" for all addresses, that no program uses.

    The kernel gives the ports of one range to outgoing connections and to servers that ask for
    port 0, so one of those may be taken before the program that shall have it starts. These ports
    lie outside that range, unless all others are taken. Raises OSError if no port is free.
    """
    first, last = _outgoing()
    others = [*range(_FIRST, first), *range(last + 1, 65_536)]
    candidates = [*random.SystemRandom().sample(others, len(others)), *[0] * count]
    ports: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(ports) == count:
                break
            try:
                server = held.enter_context(socket.create_server((host, port)))
            except OSError:
                if not port:
                    raise
                continue
            ports.append(server.getsockname()[1])
    return ports


def _outgoing() -> tuple[int, int]:
    """Return the first and the last port of outgoing connections."""
    try:
        first, last = map(int, _OUTGOING.read_text().split())
    except OSError:  # not Linux; the range of IANA
        return 49_152, 65_535
    return first, last
