"""The process group through which a trainer sends weights to its engines.

The trainer has rank 0, the processes of all engines have the ranks after it. The group is no part
of the trainer's own: a member that dies ends this group alone, and the trainer makes another one.
Members meet at a store in the trainer's process. The group has no TLS and no tokens; its addresses
are on the interface that leads to the engines.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    TCPStore,
)
from torch.distributed.distributed_c10d import BroadcastOptions

from protos.rpc.transport import address_towards
from student_trainer.rollout_client.push.shared_bucket import SharedBucket

Backend = Literal["gloo", "nccl", "ipc"]
# Of joining a group, and of each transfer: a bucket, or a weight that is larger than one.
SECONDS = 60.0
BUCKET_BYTES = 1 << 26
_LOOK_SECONDS = 0.0005
_MEET_SECONDS = 0.005
_ALL_HERE, _GIVEN_UP = "all here", "given up"
# NCCL's own watchdog ends the process when a transfer takes longer; this program aborts before.
_WATCHDOG = timedelta(days=1)


class GroupBroken(Exception):
    """A member of the group has died, or has not answered in time. The group is of no use now."""


@dataclass(frozen=True)
class Seat:
    """A place in a group, as plain values.

    group: its name, used once. host, port: of its store. size: members. rank: of this one. seconds:
    deadline of joining and of each transfer. bucket_bytes: see `stream.py`. memory: of an
    ipc group, the handle of the trainer's buffer.
    """

    group: str
    backend: Backend
    host: str
    port: int
    size: int
    rank: int
    seconds: float
    bucket_bytes: int
    memory: bytes = b""

    def after(self, ranks: int) -> Seat:
        """Return the seat that is so many ranks later."""
        return replace(self, rank=self.rank + ranks)


class Store:
    """The store at which members meet. Rank 0 has it as long as it makes groups."""

    def __init__(self, host: str) -> None:
        """Listen at a free port of `host`, an address of this machine."""
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        self.port = int(listening.getsockname()[1])
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=SECONDS),
            master_listen_fd=listening.detach(),
        )

    def seat(self, backend: Backend, size: int) -> Seat:
        """Return the first seat of a new group."""
        name = secrets.token_hex(8)
        return Seat(name, backend, self.host, self.port, size, 0, SECONDS, BUCKET_BYTES)


class WeightGroup:
    """A member of a group; see the module docstring."""

    def __init__(
        self,
        seat: Seat,
        device: torch.device,
        bucket: SharedBucket | None = None,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Collective. Join the group. Raises GroupBroken if a member does not come in time.

        `device`: of the tensors that are sent; the CPU with gloo. `bucket`: of rank 0 in an ipc
        group. `alive`: whether the other members live, as far as this one knows; asked while it
        waits for them.
        """
        self.seat = seat
        self.device = device
        self._alive = alive
        limit = timedelta(seconds=seat.seconds)
        try:
            store = TCPStore(seat.host, seat.port, is_master=False, timeout=limit)
            met = PrefixStore(seat.group, store)
            self._meet(met)
            self._group = ProcessGroup(met, seat.rank, seat.size)
            if seat.backend == "nccl":
                self._join_nccl(met)
            else:
                self._join_gloo(met, limit)
            if seat.backend == "ipc":
                self._bucket = bucket or SharedBucket.opened(seat.memory, device)
        except RuntimeError as error:
            raise GroupBroken(f"the group of {seat.size} was not formed: {error}") from error

    def broadcast(self, tensor: Tensor) -> None:
        """Collective. Send a tensor of rank 0 to the others, which receive it in theirs.

        `tensor`: contiguous, on the device of the group. Raises GroupBroken.
        """
        if self.seat.backend == "ipc":
            self._share(tensor)
        else:
            self._broadcast(tensor)

    def close(self) -> None:
        """Leave the group. Its other members get GroupBroken from transfers that run."""
        self._group.abort()
        # With gloo only this closes the connections, so that the others notice.
        del self._group

    def _meet(self, met: PrefixStore) -> None:
        """Wait until all members are there: while a group is formed, a missing one blocks it."""
        seat = self.seat
        deadline = time.monotonic() + seat.seconds
        met.set(f"here-{seat.rank}", "")
        due = [f"here-{rank}" for rank in range(seat.size)] if seat.rank == 0 else [_ALL_HERE]
        while not met.check(due):
            if time.monotonic() > deadline or not self._alive() or met.check([_GIVEN_UP]):
                if seat.rank == 0:
                    met.set(_GIVEN_UP, "")
                raise GroupBroken("a member of the group did not come")
            time.sleep(_MEET_SECONDS)
        if seat.rank == 0:
            met.set(_ALL_HERE, "")

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        deadline = time.monotonic() + self.seat.seconds
        try:
            work: Any = self._group.broadcast([tensor], options)
            if self.seat.backend == "nccl":
                # `wait` would not wait, and the watchdog would end the process.
                while not work.is_completed():
                    if time.monotonic() > deadline or not self._alive():
                        self._group.abort()
                        raise GroupBroken("a member is gone or does not answer")
                    time.sleep(_LOOK_SECONDS)
            else:
                work.wait(timedelta(seconds=self.seat.seconds))
        except RuntimeError as error:
            raise GroupBroken(f"a member is gone or does not answer: {error}") from error
        finally:
            work = None  # a traceback must not keep the connections open

    def _share(self, tensor: Tensor) -> None:
        """Copy a tensor through the trainer's buffer, which all members have mapped.

        One word over gloo says that the buffer is full, another one that all have read it.
        """
        word = torch.zeros(1, dtype=torch.uint8)
        for piece in torch.split(tensor.view(-1).view(torch.uint8), self._bucket.size):
            if self.seat.rank == 0:
                self._bucket.fill(piece)
            self._broadcast(word)
            if self.seat.rank:
                self._bucket.read(piece)
            self._all_have_read(word)

    def _all_have_read(self, word: Tensor) -> None:
        try:
            self._group.allreduce([word]).wait(timedelta(seconds=self.seat.seconds))
        except RuntimeError as error:
            raise GroupBroken(f"a member is gone or does not answer: {error}") from error

    def _join_gloo(self, met: PrefixStore, limit: timedelta) -> None:
        seat = self.seat
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(seat.host))]
        backend = ProcessGroupGloo(met, seat.rank, seat.size, options)
        self._register(ProcessGroup.BackendType.GLOO, "cpu", backend)

    def _join_nccl(self, met: PrefixStore) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG
        torch.cuda.set_device(self.device)
        backend = ProcessGroupNCCL(met, self.seat.rank, self.seat.size, options)
        self._register(ProcessGroup.BackendType.NCCL, "cuda", backend)
        # The communicator is made by the first transfer.
        self._broadcast(torch.zeros(1, device=self.device))

    def _register(self, kind: ProcessGroup.BackendType, device: str, backend: Any) -> None:
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(device), kind, backend)
