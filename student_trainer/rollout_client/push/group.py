"""The process group through which a trainer sends weights to its engines.

The trainer has rank 0, the processes of all engines have the following ranks. The group is separate
from the trainer's own group: a member that dies ends only this group, and the trainer forms another
one. Members meet at a store in the trainer's process. The group has no TLS and no tokens; its
addresses are on the interface that leads to the engines.
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
# Time limit of joining a group, and of each transfer: a bucket, or a weight larger than a bucket.
SECONDS = 60.0
BUCKET_BYTES = 1 << 26
_TRANSFER_POLL_SECONDS = 0.0005
_MEETING_POLL_SECONDS = 0.005
_ALL_JOINED_KEY, _ABANDONED_KEY = "all here", "given up"
# NCCL's own watchdog ends the process when a transfer takes longer; this program aborts earlier.
_WATCHDOG_TIMEOUT = timedelta(days=1)


class GroupBroken(Exception):
    """A member of the group has died, or has not answered in time. The group is unusable."""


@dataclass(frozen=True)
class Seat:
    """The membership of one process in a group, as plain values.

    group: its name, used once. host, port: of its store. size: number of members. rank: of this
    member. seconds: time limit of joining and of each transfer. bucket_bytes: see `stream.py`.
    memory: in an ipc group, the handle of the trainer's buffer.
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

    def shifted_by(self, ranks: int) -> Seat:
        """Return the seat with a rank that is `ranks` higher."""
        return replace(self, rank=self.rank + ranks)


class Store:
    """The store at which members meet. Rank 0 keeps it as long as it forms groups."""

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
        """Collective. Join the group. Raises GroupBroken if a member does not join in time.

        `device`: of the tensors that are sent; the CPU with gloo. `bucket`: the buffer, on rank 0
        of an ipc group. `alive`: whether the other members are alive, as far as this one knows;
        called while it waits for them.
        """
        self.seat = seat
        self.device = device
        self._is_alive = alive
        limit = timedelta(seconds=seat.seconds)
        try:
            store = TCPStore(seat.host, seat.port, is_master=False, timeout=limit)
            meeting_store = PrefixStore(seat.group, store)
            self._wait_for_members(meeting_store)
            self._group = ProcessGroup(meeting_store, seat.rank, seat.size)
            if seat.backend == "nccl":
                self._join_nccl(meeting_store)
            else:
                self._join_gloo(meeting_store, limit)
            if seat.backend == "ipc":
                self._bucket = bucket or SharedBucket.map_handle(seat.memory, device)
        except RuntimeError as error:
            raise GroupBroken(f"the group of {seat.size} was not formed: {error}") from error

    def broadcast(self, tensor: Tensor) -> None:
        """Collective. Copy `tensor` of rank 0 into `tensor` of all other ranks.

        `tensor`: contiguous, on the device of the group. Raises GroupBroken.
        """
        if self.seat.backend == "ipc":
            self._share_through_bucket(tensor)
        else:
            self._broadcast(tensor)

    def close(self) -> None:
        """Leave the group. Running transfers of its other members raise GroupBroken."""
        self._group.abort()
        # With gloo, only this closes the connections, so that the other members notice.
        del self._group

    def _wait_for_members(self, meeting_store: PrefixStore) -> None:
        """Wait until all members are present: a missing member would block the forming group."""
        seat = self.seat
        deadline = time.monotonic() + seat.seconds
        meeting_store.set(f"here-{seat.rank}", "")
        awaited_keys = (
            [f"here-{rank}" for rank in range(seat.size)] if seat.rank == 0 else [_ALL_JOINED_KEY]
        )
        while not meeting_store.check(awaited_keys):
            if (
                time.monotonic() > deadline
                or not self._is_alive()
                or meeting_store.check([_ABANDONED_KEY])
            ):
                if seat.rank == 0:
                    meeting_store.set(_ABANDONED_KEY, "")
                raise GroupBroken("a member of the group did not come")
            time.sleep(_MEETING_POLL_SECONDS)
        if seat.rank == 0:
            meeting_store.set(_ALL_JOINED_KEY, "")

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        deadline = time.monotonic() + self.seat.seconds
        try:
            work: Any = self._group.broadcast([tensor], options)
            if self.seat.backend == "nccl":
                # `wait` would not wait, and the watchdog would end the process.
                while not work.is_completed():
                    if time.monotonic() > deadline or not self._is_alive():
                        self._group.abort()
                        raise GroupBroken("a member is gone or does not answer")
                    time.sleep(_TRANSFER_POLL_SECONDS)
            else:
                work.wait(timedelta(seconds=self.seat.seconds))
        except RuntimeError as error:
            raise GroupBroken(f"a member is gone or does not answer: {error}") from error
        finally:
            work = None  # a traceback must not keep the connections open

    def _share_through_bucket(self, tensor: Tensor) -> None:
        """Copy a tensor through the trainer's buffer, which all members have mapped.

        One word over gloo signals that the buffer is full, another that all members have read it.
        """
        word = torch.zeros(1, dtype=torch.uint8)
        for piece in torch.split(tensor.view(-1).view(torch.uint8), self._bucket.size):
            if self.seat.rank == 0:
                self._bucket.fill(piece)
            self._broadcast(word)
            if self.seat.rank:
                self._bucket.read(piece)
            self._wait_until_all_read(word)

    def _wait_until_all_read(self, word: Tensor) -> None:
        try:
            self._group.allreduce([word]).wait(timedelta(seconds=self.seat.seconds))
        except RuntimeError as error:
            raise GroupBroken(f"a member is gone or does not answer: {error}") from error

    def _join_gloo(self, meeting_store: PrefixStore, limit: timedelta) -> None:
        seat = self.seat
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(seat.host))]
        backend = ProcessGroupGloo(meeting_store, seat.rank, seat.size, options)
        self._register_backend(ProcessGroup.BackendType.GLOO, "cpu", backend)

    def _join_nccl(self, meeting_store: PrefixStore) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG_TIMEOUT
        torch.cuda.set_device(self.device)
        backend = ProcessGroupNCCL(meeting_store, self.seat.rank, self.seat.size, options)
        self._register_backend(ProcessGroup.BackendType.NCCL, "cuda", backend)
        # The first transfer creates the communicator.
        self._broadcast(torch.zeros(1, device=self.device))

    def _register_backend(self, kind: ProcessGroup.BackendType, device: str, backend: Any) -> None:
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device(device), kind, backend)
