"""A push: a version of the weights that the trainer sends to its engines through a process group.

    trainer                            engine
    offer: version, specs, probe  ->   waits until the weights may be replaced (`in_flight`)
                                  <-   ready
    start: its seat in the group  ->   joins the group, unless it has that seat already
    the weights, through the group     loads them
                                  <-   loaded: the probe has verified them

The trainer makes the offers one after another, in the order of the addresses, each when the
previous engine is ready, so that two trainers that share engines never deadlock. The trainer sends
the weights when every engine is ready or has failed. An engine that fails does not have the
version; the trainer then writes it as files (`snapshot.py`) for all engines. A group is reused as
long as its members are the same processes and every push succeeds; otherwise the next push forms a
new one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import torch
from torch import Tensor

from protos import rollouts_pb2
from protos.errors import Unavailable
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import address_towards, is_loopback
from student_trainer.rollout_client.engine_replica import Replica
from student_trainer.rollout_client.push.group import (
    Backend,
    GroupBroken,
    Seat,
    Store,
    WeightGroup,
)
from student_trainer.rollout_client.push.shared_bucket import SharedBucket
from student_trainer.rollout_client.push.stream import WeightSender, WeightsOffer
from student_trainer.rollout_client.push.wire import offer_message, start_message

log = logging.getLogger(__name__)

# Time limit from the last byte to the verified probe.
_VERIFY_SECONDS = 120.0
_LOOPBACK = "127.0.0.1"


class WeightPusher:
    """Pushes versions from one process of the trainer to engines. Use it from one thread."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        device: torch.device,
        patience_seconds: float,
        *,
        shared: bool = False,
    ) -> None:
        """`device`: of the weights. `patience_seconds`: time limit for all engines to be ready.

        `shared`: whether the engines are on this GPU; the group is then of the backend ipc.
        """
        self._replicas = sorted(replicas, key=lambda replica: replica.address)
        self.device = device
        self._patience_seconds = patience_seconds
        self._shared = shared
        self._store: Store | None = None
        self._group: WeightGroup | None = None
        self._bucket: SharedBucket | None = None
        self._processes: list[tuple[str, int]] = []  # of the group: process and ranks
        self._members: list[_PushCall] = []
        self._sender: WeightSender | None = None

    @property
    def is_sending(self) -> bool:
        """Whether `send` sends: a push has begun, and is not broken."""
        return self._sender is not None

    def begin(self, offer: WeightsOffer) -> None:
        """Offer a version, wait until the engines are ready, and form the group if it is new.

        An engine that cannot be reached, refuses, or is not ready in time is logged and left out.
        """
        if self._shared:
            torch.cuda.empty_cache()  # for engines that wake
        self._members = []
        deadline = time.monotonic() + self._patience_seconds
        for replica in self._replicas:
            member = _PushCall(replica, offer)
            if member.wait_until_ready(max(1.0, deadline - time.monotonic())):
                self._members.append(member)
        waiting_members = [member for member in self._members if not member.has_version]
        if not waiting_members:
            return
        try:
            self._assign_seats(waiting_members)
        except (GroupBroken, OSError) as error:  # OSError: no route to the engine's machine
            self._abort_push(error)
            return
        assert self._group is not None
        self._sender = WeightSender(
            offer.weights,
            self._group.seat.bucket_bytes,
            self._group.device,
            self._group.broadcast,
        )
        failpoint("push-begun")

    def send(self, name: str, weight: Tensor) -> None:
        """Send the next weight, unless the push is broken."""
        if self._sender is None:
            return
        try:
            self._sender.send(name, weight)
        except GroupBroken as error:
            self._abort_push(error)

    def finish(self) -> bool:
        """Wait until the engines have verified the weights; return whether all engines have."""
        failpoint("weights-sent")
        load_results = [member.wait_until_loaded() for member in self._members]
        self._sender = None
        if not all(load_results):
            self._leave_group()
        members, self._members = self._members, []
        return all(load_results) and len(members) == len(self._replicas)

    def close(self) -> None:
        """End the pushes and leave the group."""
        for member in self._members:
            member.cancel()
        self._members, self._sender = [], None
        self._leave_group()

    def _assign_seats(self, members: Sequence[_PushCall]) -> None:
        """Give each member its ranks; join a new group if the members have changed."""
        processes = [(member.process, member.ranks) for member in members]
        is_new_group = self._group is None or processes != self._processes
        seat = (
            self._create_seat(members) if is_new_group or self._group is None else self._group.seat
        )
        next_seat = seat.shifted_by(1)
        for member in members:
            member.start(next_seat)
            next_seat = next_seat.shifted_by(member.ranks)
        if is_new_group:
            self._group = WeightGroup(
                seat, self._buffer_device(seat.backend), self._bucket, self._are_members_alive
            )
            self._processes = processes

    def _create_seat(self, members: Sequence[_PushCall]) -> Seat:
        self._leave_group()
        if self._store is None:
            hosts = [member.host for member in members if not is_loopback(member.host)]
            self._store = Store(address_towards(hosts[0]) if hosts else _LOOPBACK)
        backend: Backend = "gloo"
        if self._shared:
            backend = "ipc"
        elif {self.device.type, *(member.device for member in members)} == {"cuda"}:
            backend = "nccl"
        seat = self._store.seat(backend, 1 + sum(member.ranks for member in members))
        if backend != "ipc":
            return seat
        if self._bucket is None:
            data = torch.empty(seat.bucket_bytes, dtype=torch.uint8, device=self.device)
            self._bucket = SharedBucket(data)
        return replace(seat, memory=self._bucket.handle)

    def _are_members_alive(self) -> bool:
        return all(member.is_alive for member in self._members)

    def _buffer_device(self, backend: Backend) -> torch.device:
        return torch.device("cpu") if backend == "gloo" else self.device

    def _abort_push(self, error: Exception) -> None:
        log.warning("the weights are sent as files: %s", error)
        self._sender = None
        self._leave_group()  # first, so that the members get an error at once
        for member in self._members:
            member.cancel()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


class _PushCall:
    """The call of a push to one engine."""

    def __init__(self, replica: Replica, offer: WeightsOffer) -> None:
        self.has_version = False  # without a transfer, because the engine already had the version
        self.process, self.ranks, self.device = "", 0, ""
        self._replica = replica
        self._parts: queue.SimpleQueue[rollouts_pb2.PushPart | None] = queue.SimpleQueue()
        self._parts.put(offer_message(offer))
        self._call: Any = None
        with suppress(Unavailable):  # the service is not placed
            self._call = replica.push(iter(self._parts.get, None))

    @property
    def host(self) -> str:
        """The machine of the engine."""
        return self._replica.host

    @property
    def is_alive(self) -> bool:
        """Whether the engine has the version, or its call has not ended."""
        return self.has_version or (self._call is not None and self._call.is_active())

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait until the engine is ready for the weights or already has them; return success."""
        reply = self._next_reply(seconds)
        if reply is None:
            return False
        self.has_version = reply.WhichOneof("reply") == "loaded"
        ready = reply.ready
        self.process, self.ranks, self.device = ready.process, ready.ranks, ready.device
        return True

    def start(self, seat: Seat) -> None:
        """Have the engine join the group and receive."""
        self._parts.put(start_message(seat))
        self._parts.put(None)

    def wait_until_loaded(self) -> bool:
        """Wait at most 120 s; return whether the engine has verified the weights."""
        return self.has_version or self._next_reply(_VERIFY_SECONDS) is not None

    def cancel(self) -> None:
        """End the call."""
        if self._call is not None:
            self._call.cancel()
        self._parts.put(None)

    def _next_reply(self, seconds: float) -> rollouts_pb2.PushReply | None:
        """Return the next reply; if the call fails, log the error and return None.

        The call is cancelled if there is no reply for `seconds`.
        """
        if self._call is None:
            return None
        timer = threading.Timer(seconds, self._call.cancel)
        timer.start()
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            timeout_message = f"no answer for {seconds:.0f} s" if timer.finished.is_set() else None
            fault = timeout_message or self._replica.fault_of(error)
            log.warning("no push to the %s: %s", self._replica.name, fault)
            self.cancel()
            return None
        finally:
            timer.cancel()
