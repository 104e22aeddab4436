"""Selects free ports for later programs, and finds the program that listens on a port."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LISTEN = "0A"  # a state in /proc/net/tcp
_FIRST_PORT = 20_000  # lower ports: well-known services, and Ray's workers (10,002 to 19,999)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different free ports of `host`; "" means all addresses.

    The kernel takes ports of one range for outgoing connections, and for servers that bind port 0.
    Another program could therefore get a port of this range before the caller's program starts. The
    returned ports are outside this range if possible. Raises OSError if no port is free.
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


def describe_listener(port: int) -> str:
    """Return a text about the program that listens on a port; "" if no program listens.

    The text names the user and, if visible, the program and its directory. Linux shows the user of
    every listening socket to all users, but the process only to the same user and to root.
    """
    import pwd  # not on Windows

    uid, socket_link = _listening_socket(port)
    if not socket_link:
        return ""
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(descriptor.readlink()) == socket_link:
                process = descriptor.parents[1]
                program = (process / "comm").read_text(encoding="utf-8").strip()
                directory = (process / "cwd").readlink()
                return f"{program} (process {process.name} of {user}, in {directory})"
    return f"a process of {user}"


def _listening_socket(port: int) -> tuple[int, str]:
    """Return (user id, link) of the socket that listens on a port; (0, "") if there is none.

    The link is the text `socket:[INODE]`, as in /proc/PID/fd.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    return int(uid), f"socket:[{inode}]"
    return 0, ""


def _outgoing_range() -> tuple[int, int]:
    """Return the first and the last port that the kernel uses for outgoing connections."""
    try:
        first_port, last_port = map(int, _RANGE_FILE.read_text(encoding="utf-8").split())
    except OSError:  # not Linux: use the range of IANA
        return 49_152, 65_535
    return first_port, last_port
