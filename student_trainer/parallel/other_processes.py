"""The other processes of an attempt: the network interface to them, and their loss."""

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
    own = address_towards(environment["MASTER_ADDR"])
    for name, addresses in psutil.net_if_addrs().items():
        if own in (one.address.partition("%")[0] for one in addresses):
            environment[_GLOO_INTERFACE] = name


def is_of_lost_process(error: RuntimeError) -> bool:
    """Return whether a collective has failed because of another process or the network.

    NCCL and the store raise DistError then; gloo raises RuntimeError with the place in its source.
    """
    return isinstance(error, DistError) or "gloo" in str(error).lower()
