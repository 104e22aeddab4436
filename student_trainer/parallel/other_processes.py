"""The other processes of an attempt: the network interface to them, and their loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import psutil
from torch.distributed import DistError

from clients.runs.progress import AttemptDied
from protos.rpc.transport import address_towards

Found = TypeVar("Found")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def select_interface() -> None:
    """Have gloo use the network interface that leads to the first process's machine.

    By default gloo announces the address to which this machine's own name resolves, often the
    loopback (/etc/hosts of Debian), which no other machine reaches. Does nothing for processes of
    one machine, and if $GLOO_SOCKET_IFNAME is set. Call it before the process group is formed.
    """
    environment = os.environ
    if _GLOO_INTERFACE in environment or "MASTER_ADDR" not in environment:
        return
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return
    own = address_towards(environment["MASTER_ADDR"])
    for name, addresses in psutil.net_if_addrs().items():
        if own in (one.address.partition("%")[0] for one in addresses):
            environment[_GLOO_INTERFACE] = name


def or_die_with_group(attempt: Callable[[], Found]) -> Found:
    """Return `attempt()`. Raises AttemptDied where a collective has lost a process.

    NCCL and the store raise DistError then; gloo raises RuntimeError with the place in its source.
    """
    try:
        return attempt()
    except RuntimeError as error:
        if isinstance(error, DistError) or "gloo" in str(error).lower():
            raise AttemptDied(f"another process of the trainer is lost: {error}") from error
        raise
