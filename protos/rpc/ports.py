"""Chooses ports of this machine for programs that start later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # lower ports: well-known services, and Ray's workers (10,002 to 19,999)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different free ports of `host`; "" means all addresses.

    The kernel assigns the ports of one range to outgoing connections and to servers that bind port
    0, so another program could take such a port before this program starts. The returned ports are
    outside this range, if possible. Raises OSError if no port is free.
    """
    first_outgoing, last_outgoing = _outgoing_range()
    unreserved_ports = [*range(_FIRST_PORT, first_outgoing), *range(last_outgoing + 1, 65_536)]
    candidates = [
        *random.SystemRandom().sample(unreserved_ports, len(unreserved_ports)),
        *[0] * count,
    ]
    ports: list[int] = []
    with ExitStack() as reserved_sockets:
        for port in candidates:
            if len(ports) == count:
                break
            try:
                server = reserved_sockets.enter_context(socket.create_server((host, port)))
            except OSError:
                if not port:
                    raise
                continue
            ports.append(server.getsockname()[1])
    return ports


def _outgoing_range() -> tuple[int, int]:
    """Return the first and the last port of outgoing connections."""
    try:
        first_port, last_port = map(int, _RANGE_FILE.read_text().split())
    except OSError:  # not Linux: use the range of IANA
        return 49_152, 65_535
    return first_port, last_port
