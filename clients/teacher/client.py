"""A teacher behind gRPC, for programs without an event loop: futures in, rows out, through any
restart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc
from numpy.typing import NDArray

from clients.teacher.connection import CONNECT_SECONDS, SharedIdentity, TeacherLane, lives
from clients.teacher.info import TeacherInfo, TeacherLoad, info_of, load_of
from clients.teacher.pending_requests import ScoreWindow
from clients.teacher.push_weights import push_weights
from clients.teacher.query import ScoreQuery, request_of, tokenizer_fingerprint
from protos import teacher_pb2
from protos.errors import DistillError, InvalidInput, TimedOut, Unavailable
from protos.rows.codec import RowBlock
from protos.rpc.statuses import TLS_HINT, fault_of
from protos.rpc.transport import MAX_MESSAGE_BYTES

__all__ = ["ScoreQuery", "TeacherClient", "TeacherInfo", "tokenizer_fingerprint"]

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 128
MAX_PREFETCH_BYTES = 256 << 20
# A teacher at work on one huge batch sends nothing, but lives: it gets so many times the patience.
_BUSY_FACTOR = 10
_ENVELOPE_BYTES = 1024


class TeacherClient:
    """Scores queries over one stream a teacher, each kept up by a thread of its own.

    A broken stream is opened again and every unfinished request asks from its first missing row.
    With several addresses, all of them teachers with the same weights, each takes requests as it
    answers them, and what one leaves unanswered goes to the others at once; rows of two scorings
    are never mixed. If nothing comes for `patience_seconds`, and no teacher is healthy either, all
    unfinished requests fail with Unavailable; one that lives but sends no row is given ten times as
    long. If a teacher with other weights answers on reconnect, and no other carries on, they fail
    with WrongState.

    Rows are fetched ahead of the caller up to `max_prefetch_bytes`: wait with the futures' own
    `result`, which is never held back, not with `concurrent.futures.wait`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        patience_seconds: float = 60.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        max_prefetch_bytes: int = MAX_PREFETCH_BYTES,
        field: str = "teacher.address",
        scope: str = "",
    ) -> None:
        """`max_in_flight`: requests on one stream; `field`: what faults name; `scope`: ask with a
        token that is derived for it, as `open_channel` tells.
        """
        addresses = [address] if isinstance(address, str) else [*address]
        several = len(addresses) > 1
        self._name = f"{'teachers' if several else 'teacher'} at {', '.join(addresses)}"
        self._field = field
        self._patience_seconds = patience_seconds
        self._window = ScoreWindow(max_in_flight, max_prefetch_bytes)
        self._identity = SharedIdentity(field)
        self._lanes = [
            TeacherLane(one, self._window, self._identity, self._on_wrong_teacher, scope)
            for one in addresses
        ]
        self._watcher = threading.Thread(target=self._watch, name="teacher-watch", daemon=True)
        for lane in self._lanes:
            lane.start()
        self._watcher.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def held_bytes(self) -> int:
        """Of rows on their way, or there and not yet taken."""
        return self._window.held_bytes

    def info(self) -> TeacherInfo:
        """What the teacher is. Raises Unavailable if none answers within 5 s, WrongState if two of
        them differ.
        """
        found: TeacherInfo | None = None
        faults: list[DistillError] = []
        for lane in self._lanes:
            try:
                # The caller compares its student with this one; no other may take its place.
                found = info_of(lane.get_info())
            except grpc.RpcError as error:
                faults.append(self._unavailable(error, lane))
        if found is None:
            raise faults[-1]
        for fault in faults:
            log.warning("%s", fault)
        return found

    def load(self) -> TeacherLoad:
        """What the first teacher does now, and did since its start. Raises Unavailable."""
        [lane, *_] = self._lanes
        try:
            return load_of(lane.ask())
        except grpc.RpcError as error:
            raise self._unavailable(error, lane) from error

    def vocabulary(self) -> list[str]:
        """The tokens by id. Raises Unavailable."""
        request = teacher_pb2.GetVocabularyRequest()
        for lane in self._lanes:
            try:
                chunks = lane.stub.GetVocabulary(request, timeout=self._patience_seconds)
                return [token for chunk in chunks for token in chunk.tokens]
            except grpc.RpcError as error:
                fault = self._unavailable(error, lane)
        raise fault

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Ask for rows; never blocks. The block of the future always has head ids.

        Raises InvalidInput for a query too large for one message.
        """
        _require_sendable(query)
        return self._window.submit(query)

    def push_weights(
        self, tensors: Mapping[str, NDArray[Any]], *, tau: float | None = None
    ) -> TeacherInfo:
        """Give the teacher new weights, or with `tau` an average with them; see `weights_parts`.

        Returns what it is then. Every row that comes later is of the new weights: what is
        unfinished is asked for again. Other clients of this teacher fail with WrongState. A push
        that fails has changed nothing; after Unavailable and TimedOut, `info` tells.
        """
        if len(self._lanes) > 1:
            raise InvalidInput("weights can be pushed to one teacher only", field=self._field)
        [lane] = self._lanes
        with self._identity.changing():
            try:
                info = lane.ask()
                self._identity.check(info, lane.name)
                reply = push_weights(lane.stub, tensors, tau=tau, base_version=info.version)
            except grpc.RpcError as error:
                raise fault_of(error, lane.name) from error
            self._identity.adopt(reply.fingerprint, reply.version)
            self._window.ask_again()
        return replace(info_of(info), fingerprint=reply.fingerprint, version=reply.version)

    def close(self) -> None:
        """End at once; unfinished futures are cancelled."""
        self._window.close()
        for lane in self._lanes:
            lane.close()
        self._watcher.join()

    def _on_wrong_teacher(self, fault: DistillError) -> None:
        if not any(lane.connected for lane in self._lanes):
            self._window.fail_all(fault)

    def _watch(self) -> None:
        patience = self._patience_seconds
        probe = min(CONNECT_SECONDS, patience / 2)
        alive_at = 0.0
        while self._window.wait_for_stall(patience - probe, alive_at):
            before = self._window.silent_since
            alive = self._one_lives(probe)
            if self._window.silent_since > before:
                continue
            if alive:
                alive_at = time.monotonic()
                if alive_at - before < _BUSY_FACTOR * patience:
                    continue
            self._window.fail_all(self._silence(alive))
            for lane in self._lanes:
                lane.cut()

    def _one_lives(self, seconds: float) -> bool:
        try:
            checks = [lane.ask_health(seconds) for lane in self._lanes]
        except ValueError:  # the channels were closed meanwhile
            return False
        return any(lives(check) for check in checks)

    def _silence(self, alive: bool) -> Unavailable:
        faults = [lane.last_fault.message for lane in self._lanes if lane.last_fault]
        last = f" (last: {'; '.join(faults)})" if faults else ""
        if alive:
            return Unavailable(
                f"the {self._name} answers, but has sent no row for"
                f" {_BUSY_FACTOR * self._patience_seconds:g} s{last}",
                field=self._field,
                hint="look into its log"
                if faults
                else "give it a smaller --max-batch-tokens, or raise teacher.patience_seconds",
            )
        return Unavailable(
            f"the {self._name} has not answered for {self._patience_seconds:g} s{last}",
            field=self._field,
            hint="start the teacher again, then resume the job",
        )

    def _unavailable(self, error: grpc.RpcError, lane: TeacherLane) -> DistillError:
        call: Any = error
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(
                f"what answers at {lane.address} is not a teacher",
                field=self._field,
                hint="give the HOST:PORT that distill-teacher printed",
            )
        fault = fault_of(error, lane.name)
        if not isinstance(fault, Unavailable | TimedOut):
            return fault
        return Unavailable(
            f"no teacher answers at {lane.address}",
            field=self._field,
            hint=TLS_HINT
            if lane.address.startswith("https://")
            else "start one with distill-teacher, or check the address",
        )


def _require_sendable(query: ScoreQuery) -> None:
    try:
        size = request_of(query, "").ByteSize() + _ENVELOPE_BYTES
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"not a query: {error}", field="start") from error
    if size > MAX_MESSAGE_BYTES:
        raise InvalidInput(
            f"a query of {size} bytes is more than a message holds ({MAX_MESSAGE_BYTES})",
            field="head_ids",
            hint="score fewer positions, or fewer head ids a position",
        )
