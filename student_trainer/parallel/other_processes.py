"""The network interface to the other processes of an attempt, and the errors of lost processes."""

from __future__ import annotations

import os

import psutil
from torch.distributed import DistError

from protos.rpc.transport import address_towards

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
    own_address = address_towards(environment["MASTER_ADDR"])
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in (address.address.partition("%")[0] for address in addresses):
            environment[_GLOO_INTERFACE] = name


def is_lost_process_error(error: RuntimeError) -> bool:
    """Return whether `error` means that a collective failed because of another process or network.

    NCCL and the store raise DistError; gloo raises RuntimeError with a position in its source.
    """
    return isinstance(error, DistError) or "gloo" in str(error).lower()
