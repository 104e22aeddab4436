"""`TeacherClient`: scores sequences at teacher services. It continues after a restart of a service.

`submit` takes a query and returns a future of its rows; `asyncio.wrap_future` makes the future
awaitable. `score` and `as_completed` take many queries and wait for their rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import grpc
from numpy.typing import NDArray

from clients.teacher.connection import (
    CONNECT_SECONDS,
    PERMANENT_FAULTS,
    SharedIdentity,
    TeacherConnection,
    is_alive,
    not_a_teacher,
)
from clients.teacher.info import TeacherInfo, TeacherLoad, info_of, load_of
from clients.teacher.pending_requests import PendingRequests
from clients.teacher.push_weights import push_weights
from clients.teacher.query import MAX_TAIL_DRAWS, ScoreQuery, request_of, tokenizer_fingerprint
from protos import teacher_pb2
from protos.errors import DistillError, InvalidInput, TimedOut, Unavailable
from protos.rows.codec import RowBlock
from protos.rpc.channel import is_forked, require_unforked
from protos.rpc.statuses import TLS_HINT, fault_of, sent_fault
from protos.rpc.transport import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES

__all__ = ["ScoreQuery", "TeacherClient", "TeacherInfo", "tokenizer_fingerprint"]

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 128
MAX_PREFETCH_BYTES = 256 << 20
# A healthy teacher scores nothing while it computes one huge batch: wait this many times
# `patience_seconds` for such a teacher. While a teacher scores requests of other clients, this
# client's requests wait in the queue of the teacher.
_BUSY_FACTOR = 10
_ENVELOPE_BYTES = 1024


class TeacherNotReady(Unavailable):
    """Raised for a teacher that answers, but is loading its model or stopping.

    The message says which of the two.
    """


class TeacherClient:
    """Scores queries at one or several teacher services. All methods are thread-safe.

    Each teacher has a stream, and a thread that opens the stream again after a fault. Unfinished
    requests then continue from their first missing row. All addresses must have teachers with the
    same weights. A teacher gets new requests as it finishes old requests. If a teacher is lost, its
    unfinished requests go to the other teachers at once. All rows of a sequence come from the same
    scoring.

    All unfinished requests fail with Unavailable in two cases:

    - for `patience_seconds`, no message arrives and no teacher answers a health check
    - for ten times `patience_seconds`, a teacher answers health checks, but scores no tokens of any
      client

    They fail with WrongState if a teacher reconnects with other weights and no other teacher is
    connected.

    Rows are prefetched up to `max_prefetch_bytes`. A request is not limited by this number while a
    caller waits for its future, with `result`, `concurrent.futures.wait`, `as_completed` or a
    callback.

    A copy of a client, such as the copy in a process that multiprocessing starts with "spawn",
    opens its own connections, with the token in the environment of its process. In a process that
    was forked after a connection opened, each call raises WrongState.
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
        background: bool = False,
        adapter: str = "",
    ) -> None:
        """Start one thread per teacher. The connections open on first use.

        - `address`: HOST:PORT of one teacher, or several of them
        - `patience_seconds`, `max_prefetch_bytes`: see the class
        - `max_in_flight`: maximum number of requests on a stream that are not answered yet
        - `field`: the key or option that errors name
        - `scope`: send a token that is derived for this scope; see
          `protos.rpc.channel.open_channel`
        - `background`: teachers score requests of this client only while no other client waits
        - `adapter`: name of the adapter for every query; "" means none
        """
        addresses = [address] if isinstance(address, str) else [*address]
        self._copy = partial(
            TeacherClient,
            addresses,
            patience_seconds=patience_seconds,
            max_in_flight=max_in_flight,
            max_prefetch_bytes=max_prefetch_bytes,
            field=field,
            scope=scope,
            background=background,
            adapter=adapter,
        )
        has_several = len(addresses) > 1
        self._name = f"{'teachers' if has_several else 'teacher'} at {', '.join(addresses)}"
        self._field = field
        self._patience_seconds = patience_seconds
        self._window = PendingRequests(max_in_flight, max_prefetch_bytes)
        self._adapter = adapter
        self._identity = SharedIdentity(field, adapter)
        self._lanes = [
            TeacherConnection(
                teacher_address,
                self._window,
                self._identity,
                self._on_wrong_teacher,
                scope,
                background,
            )
            for teacher_address in addresses
        ]
        self._watcher = threading.Thread(
            target=self._watch_for_stall, name="teacher-watch", daemon=True
        )
        for lane in self._lanes:
            lane.start()
        self._watcher.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

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
        """Size in bytes of the rows that were requested, and that no caller has taken yet."""
        return self._window.held_bytes

    @property
    def silence_seconds(self) -> float:
        """Seconds since the last message from the teachers.

        The value is 0 if no teacher has a request to answer.
        """
        return self._window.silence_seconds()

    @property
    def is_closed(self) -> bool:
        """True after a call of `close`."""
        return self._window.closed

    def answers(self) -> bool:
        """Return whether any teacher answers a health check. Waits for at most 5 s."""
        return self._any_alive(CONNECT_SECONDS)

    def fail_silent(self, duration: str) -> None:
        """Fail all unfinished requests with Unavailable. Later requests are not affected.

        `duration`: text for the message about the time without an answer, such as "for 20 s".
        """
        self._fail_all(self._silence_error(duration))

    def info(self, *, waits: bool = True) -> TeacherInfo:
        """Return the model, fingerprint and limits of the teachers. All teachers of a client share
        them.

        `waits`: True waits up to 5 s for a teacher that does not listen yet; False treats such a
        teacher as unreachable at once. If this client has an adapter, the fingerprint covers the
        model and the adapter. If only some teachers do not answer within 5 s, they are logged.

        Raises Unavailable if no teacher answers, WrongState if two teachers differ or a teacher
        does not have the adapter, InvalidInput if a server is not a teacher, and Unauthenticated or
        Forbidden if a token is refused.
        """
        require_unforked()
        teacher_info: TeacherInfo | None = None
        faults: list[DistillError] = []
        # Call all teachers at the same time, so that two unreachable teachers take 5 s and not 10.
        calls = [lane.start_info_call(waits=waits) for lane in self._lanes]
        max_draws, takes_vocab_size = MAX_TAIL_DRAWS, True
        for lane, call in zip(self._lanes, calls, strict=True):
            try:
                # Pins the identity: the caller checks its student against this teacher, so a
                # teacher with another identity is refused from now on.
                teacher_info = info_of(lane.get_info(call))
                max_draws = min(max_draws, teacher_info.max_tail_draws)
                takes_vocab_size = takes_vocab_size and teacher_info.takes_vocab_size
            except grpc.RpcError as error:
                faults.append(self._connection_error(error, lane))
        for fault in sorted(faults, key=lambda candidate: not isinstance(candidate, InvalidInput)):
            if teacher_info is None or isinstance(fault, InvalidInput):
                raise fault
            log.warning("%s", fault)
        assert teacher_info is not None
        fingerprint = (
            teacher_info.adapters[self._adapter] if self._adapter else teacher_info.fingerprint
        )
        return replace(
            teacher_info,
            fingerprint=fingerprint,
            max_tail_draws=max_draws,
            takes_vocab_size=takes_vocab_size,
        )

    def load(self) -> TeacherLoad:
        """Return the present load and the counters of the first teacher.

        Raises Unavailable if the teacher does not answer within 5 s.
        """
        require_unforked()
        [lane, *_] = self._lanes
        try:
            return load_of(lane.query_info())
        except grpc.RpcError as error:
            raise self._connection_error(error, lane) from error

    def vocabulary(self) -> list[str]:
        """Return the teacher's tokens; the index is the token id.

        Asks the teachers one after the other, each for at most `patience_seconds`. Raises
        Unavailable if none answers.
        """
        require_unforked()
        request = teacher_pb2.GetVocabularyRequest()
        for lane in self._lanes:
            try:
                chunks = lane.stub.GetVocabulary(request, timeout=self._patience_seconds)
                return [token for chunk in chunks for token in chunk.tokens]
            except grpc.RpcError as error:
                fault = self._connection_error(error, lane)
        raise fault

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Request the rows of `query`, and return a future of the rows at once.

        The RowBlock of the future always has head ids. The future fails with the teacher's error,
        or with an error that the class describes. `close` cancels the future. Raises InvalidInput
        if the query cannot be encoded or is larger than 64 MiB, Unavailable after `close`.
        """
        require_unforked()
        if self._adapter:
            query = replace(query, adapter=self._adapter)
        _require_sendable(query)
        return self._window.submit(query)

    def score(self, queries: Iterable[ScoreQuery]) -> list[RowBlock]:
        """Return the rows of each query, in the order of `queries`.

        If a query fails, its error is raised, and the other queries are cancelled. If several
        queries fail, the error of the first of them in `queries` is raised.
        """
        futures = [self.submit(query) for query in queries]
        try:
            return [future.result() for future in futures]
        finally:
            _cancel_all(futures)

    def as_completed(self, queries: Iterable[ScoreQuery]) -> Iterator[tuple[int, RowBlock]]:
        """Yield (index of the query, its rows) for each query as soon as its rows arrive.

        Raises the error of a failed query. After an error, or if the caller leaves the loop, the
        unfinished queries are cancelled.
        """
        numbers = {self.submit(query): number for number, query in enumerate(queries)}
        try:
            for future in as_completed(numbers):
                # Keep no reference to rows that the caller has received.
                yield numbers.pop(future), future.result()
        finally:
            _cancel_all(numbers)

    def push_weights(
        self, tensors: Mapping[str, NDArray[Any]], *, tau: float | None = None
    ) -> TeacherInfo:
        """Replace the teacher's weights, or average them with `tau`. Return the new TeacherInfo.

        `tensors` maps every parameter name to its array; see `weights_parts`. With `tau`, the
        teacher sets phi <- tau phi + (1 - tau) theta, where phi are its weights and theta is
        `tensors`.

        All rows that arrive after this call come from the new weights, because unfinished requests
        are scored again. Other clients of this teacher fail with WrongState. The call takes at most
        one hour.

        Raises InvalidInput for several teachers or for arrays that cannot be pushed, and the
        teacher's error if it refuses the push. The weights are unchanged after these errors. After
        Unavailable or TimedOut, the weights may have changed: call `info` to read their version.
        """
        require_unforked()
        if len(self._lanes) > 1:
            raise InvalidInput(
                "weights can be pushed to one teacher only",
                field=self._field,
                hint="give one address",
            )
        [lane] = self._lanes
        with self._identity.changing():
            try:
                info = lane.query_info()
                self._identity.check(info, lane.name)
                reply = push_weights(lane.stub, tensors, tau=tau, base_version=info.version)
            except grpc.RpcError as error:
                raise fault_of(error, lane.name) from error
            self._identity.adopt(reply.fingerprint, reply.version)
            self._window.rescore_all()
        return replace(info_of(info), fingerprint=reply.fingerprint, version=reply.version)

    def close(self) -> None:
        """Cancel all unfinished futures, close the connections and join the threads."""
        if is_forked():  # the threads and connections are those of the parent
            return
        self._window.close()
        for lane in self._lanes:
            lane.close()
        self._watcher.join()

    def _on_wrong_teacher(self, fault: DistillError) -> None:
        # Another teacher of the client may be unreachable only temporarily.
        if all(isinstance(lane.last_fault, PERMANENT_FAULTS) for lane in self._lanes):
            self._window.fail_all(fault)

    def _watch_for_stall(self) -> None:
        patience = self._patience_seconds
        probe_seconds = min(CONNECT_SECONDS, patience / 2)
        alive_at = moved_at = warned_at = 0.0
        loads: Mapping[str, TeacherLoad] = {}
        while self._window.wait_for_stall(patience - probe_seconds, alive_at):
            silent_since = self._window.silent_since
            if silent_since > alive_at:  # a new silence
                loads, warned_at = {}, silent_since + patience
            is_any_alive = self._any_alive(probe_seconds)
            earlier, loads = loads, self._loads() if is_any_alive else {}
            if self._window.silent_since > silent_since:
                continue
            if is_any_alive:
                alive_at = time.monotonic()
                if _has_scored(earlier, loads):
                    moved_at = alive_at
                    # Once for each doubling of the wait.
                    if alive_at - silent_since >= 2 * (warned_at - silent_since):
                        warned_at = alive_at
                        log.warning(
                            "the %s scores requests of others: no row for %.0f s, %d tokens wait",
                            self._name,
                            alive_at - silent_since,
                            sum(load.queued_tokens for load in loads.values()),
                        )
                if alive_at - max(silent_since, moved_at) < _BUSY_FACTOR * patience:
                    continue
            self._fail_all(self._stall_error(is_any_alive))

    def _fail_all(self, fault: DistillError) -> None:
        self._window.fail_all(fault)
        for lane in self._lanes:
            lane.cancel_stream()

    def _loads(self) -> Mapping[str, TeacherLoad]:
        """Return the load of each teacher that answers, by address."""
        loads = {}
        for lane in self._lanes:
            with suppress(grpc.RpcError, ValueError):  # `close` closed the channels
                loads[lane.address] = load_of(lane.query_info())
        return loads

    def _any_alive(self, seconds: float) -> bool:
        try:
            checks = [lane.start_health_check(seconds) for lane in self._lanes]
        except ValueError:  # `close` closed the channels
            return False
        return any(is_alive(check) for check in checks)

    def _stall_error(self, alive: bool) -> Unavailable:
        if alive:
            last_faults = self._last_faults()
            return Unavailable(
                f"the {self._name} answers, but has scored nothing for"
                f" {_BUSY_FACTOR * self._patience_seconds:g} s{last_faults}",
                field=self._field,
                hint="read the teacher's log"
                if last_faults
                else "start the teacher with a smaller --max-batch-tokens, or raise"
                " teacher.patience_seconds",
            )
        return self._silence_error(f"for {self._patience_seconds:g} s")

    def _silence_error(self, duration: str) -> Unavailable:
        return Unavailable(
            f"the {self._name} has not answered {duration}{self._last_faults()}",
            field=self._field,
            hint="start the teacher again, then resume the job",
        )

    def _last_faults(self) -> str:
        faults = [lane.last_fault.message for lane in self._lanes if lane.last_fault]
        return f" (last: {'; '.join(faults)})" if faults else ""

    def _connection_error(self, error: grpc.RpcError, lane: TeacherConnection) -> DistillError:
        if wrong_program := not_a_teacher(error, lane.address, self._field):
            return wrong_program
        fault = fault_of(error, lane.name)
        if not isinstance(fault, Unavailable | TimedOut):
            return fault
        if sent_fault(error):  # the teacher loads its model or stops
            return TeacherNotReady(
                f"the {lane.name} answers: {fault.message}", field=self._field, hint=fault.hint
            )
        return Unavailable(
            f"no teacher answers at {lane.address}",
            field=self._field,
            hint=TLS_HINT
            if lane.address.startswith("https://")
            else "start a teacher with distill-teacher, or check the address",
        )


def _has_scored(earlier: Mapping[str, TeacherLoad], loads: Mapping[str, TeacherLoad]) -> bool:
    """Return whether a teacher has scored tokens between two calls of `_loads`."""
    return any(
        load.scored_tokens != earlier.get(address, load).scored_tokens
        for address, load in loads.items()
    )


def _cancel_all(futures: Iterable[Future[RowBlock]]) -> None:
    for future in futures:
        future.cancel()


def _require_sendable(query: ScoreQuery) -> None:
    try:
        size = request_of(query, "").ByteSize() + _ENVELOPE_BYTES
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the query cannot be encoded: {error}", field="start") from error
    in_parts = query.head_ids is not None or query.images
    max_bytes = MAX_REQUEST_BYTES if in_parts else MAX_MESSAGE_BYTES
    if size > max_bytes:
        raise InvalidInput(
            f"the query has {size} bytes, but one request holds {max_bytes}",
            field="images" if query.images else "head_ids",
            hint="use smaller images"
            if query.images
            else "score fewer positions, or use fewer head ids per position",
        )
