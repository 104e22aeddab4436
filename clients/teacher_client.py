"""A teacher behind gRPC, for programs without an event loop: futures in, rows out, through any
restart.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from clients.score_query import (
    IDENTITY_KEY,
    ScoreQuery,
    identity_of,
    request_of,
    tokenizer_fingerprint,
)
from clients.score_window import ScoreWindow
from protos import teacher_pb2, teacher_pb2_grpc
from protos.channel import TEACHER_TOKEN, open_channel
from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from protos.rows import RowBlock
from protos.statuses import fault_of
from protos.transport import MAX_MESSAGE_BYTES

__all__ = ["ScoreQuery", "TeacherClient", "TeacherInfo", "tokenizer_fingerprint"]

MAX_IN_FLIGHT = 128
_CONNECT_SECONDS = 5.0
# A teacher at work on one huge batch sends nothing, but lives: it gets so many times the patience.
_BUSY_FACTOR = 10
_MAX_BACKOFF_SECONDS = 2.0
_ENVELOPE_BYTES = 1024
_FIELD = "teacher.address"


@dataclass(frozen=True)
class TeacherInfo:
    """What GetInfo says; see teacher.proto."""

    model: str
    fingerprint: str
    version: int
    tokenizer_fingerprint: str
    vocab_size: int
    max_top_k: int
    max_length: int
    dtype: str
    engine: str
    batch_invariant: bool


class TeacherClient:
    """Scores queries over one stream, kept up by a thread of its own.

    A broken stream is opened again and every unfinished request asks from its first missing row. If
    nothing comes for `patience_seconds`, and the teacher does not say what it is either, all
    unfinished requests fail with Unavailable; one that lives but sends no row is given ten times as
    long. If another teacher answers on reconnect, they fail with WrongState.
    """

    def __init__(
        self, address: str, *, patience_seconds: float = 60.0, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self._address = address
        self._name = f"teacher at {address}"
        self._patience_seconds = patience_seconds
        self._channel = open_channel(address, token=TEACHER_TOKEN)
        self._stub = teacher_pb2_grpc.TeacherStub(self._channel)
        self._window = ScoreWindow(max_in_flight)
        self._identity: str | None = None
        self._last_fault: DistillError | None = None
        self._call: Any = None
        self._threads = [
            threading.Thread(target=target, name=f"teacher-{name}", daemon=True)
            for name, target in (("stream", self._keep_streaming), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def info(self) -> TeacherInfo:
        """What the teacher is. Raises Unavailable after 5 s without an answer."""
        try:
            message = self._stub.GetInfo(
                teacher_pb2.GetInfoRequest(), timeout=_CONNECT_SECONDS, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise self._unavailable(error) from error
        # The caller compares its student with this one; no other may take its place.
        self._identity = self._identity or identity_of(message.fingerprint, message.version)
        return _info_of(message)

    def vocabulary(self) -> list[str]:
        """The tokens by id. Raises Unavailable."""
        tokens: list[str] = []
        request = teacher_pb2.GetVocabularyRequest()
        try:
            for chunk in self._stub.GetVocabulary(request, timeout=self._patience_seconds):
                tokens.extend(chunk.tokens)
        except grpc.RpcError as error:
            raise self._unavailable(error) from error
        return tokens

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        """Ask for rows; never blocks. The block of the future always has head ids.

        Raises InvalidInput for a query too large for one message.
        """
        _require_sendable(query)
        return self._window.submit(query)

    def close(self) -> None:
        """End at once; unfinished futures are cancelled."""
        self._window.close()
        self._channel.close()  # cancels the stream
        for thread in self._threads:
            thread.join()

    def _keep_streaming(self) -> None:
        failures = 0
        while self._window.wait_for_work():
            before = self._window.last_progress
            self._last_fault = self._stream_until_fault()
            if isinstance(self._last_fault, WrongState | Unauthenticated | Forbidden):
                self._window.fail_all(self._last_fault)
            self._window.reconnect()
            failures = 0 if self._window.last_progress > before else failures + 1
            backoff = min(_MAX_BACKOFF_SECONDS, 0.05 * 2**failures)
            self._window.wait_closed(backoff * random.uniform(0.5, 1.0))

    def _stream_until_fault(self) -> DistillError | None:
        """One stream, from connection to end; None when the teacher ended it in good order."""
        try:
            identity = self._require_same_teacher()
            self._call = self._stub.Score(
                self._window.requests(), metadata=((IDENTITY_KEY, identity),)
            )
            for chunk in self._call:
                self._window.receive(chunk)
        except grpc.RpcError as error:
            return fault_of(error, self._name)
        except WrongState as fault:
            return fault
        except ValueError:
            # What grpc says to a call on a closed channel.
            if not self._window.closed:
                raise
        return None

    def _require_same_teacher(self) -> str:
        message = self._stub.GetInfo(
            teacher_pb2.GetInfoRequest(), timeout=_CONNECT_SECONDS, wait_for_ready=True
        )
        identity = identity_of(message.fingerprint, message.version)
        self._identity = self._identity or identity
        if identity != self._identity:
            raise WrongState(
                f"the {self._name} is now {identity}, it was {self._identity}",
                field=_FIELD,
                hint="start it with the weights the job began with, or start a new job",
            )
        return identity

    def _watch(self) -> None:
        patience = self._patience_seconds
        probe = min(_CONNECT_SECONDS, patience / 5)
        alive_at = 0.0
        while self._window.wait_for_stall(patience - probe, alive_at):
            before = self._window.last_progress
            alive = self._lives(probe)
            if self._window.last_progress > before:
                continue
            if alive:
                alive_at = time.monotonic()
                if alive_at - before < _BUSY_FACTOR * patience:
                    continue
            self._window.fail_all(self._silence(alive))
            if self._call is not None:
                self._call.cancel()

    def _lives(self, seconds: float) -> bool:
        """Whether the teacher answers anything at all."""
        try:
            self._stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=seconds, wait_for_ready=True)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed meanwhile
            return False
        return True

    def _silence(self, alive: bool) -> Unavailable:
        if alive:
            return Unavailable(
                f"the {self._name} answers, but has sent no row for"
                f" {_BUSY_FACTOR * self._patience_seconds:g} s",
                field=_FIELD,
                hint="give it a smaller --max-batch-tokens, or raise teacher.patience_seconds",
            )
        last = f" (last: {self._last_fault.message})" if self._last_fault else ""
        return Unavailable(
            f"the {self._name} has not answered for {self._patience_seconds:g} s{last}",
            field=_FIELD,
            hint="start the teacher again, then resume the job",
        )

    def _unavailable(self, error: grpc.RpcError) -> DistillError:
        call: Any = error
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Unavailable(
                f"what answers at {self._address} is not a teacher",
                field=_FIELD,
                hint="give the HOST:PORT that distill-teacher printed",
            )
        fault = fault_of(error, self._name)
        if isinstance(fault, Unauthenticated | Forbidden):
            return fault
        return Unavailable(
            f"no teacher answers at {self._address}",
            field=_FIELD,
            hint="start one with distill-teacher, or check the address",
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


def _info_of(message: teacher_pb2.TeacherInfo) -> TeacherInfo:
    return TeacherInfo(
        model=message.model,
        fingerprint=message.fingerprint,
        version=message.version,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        max_top_k=message.max_top_k,
        max_length=message.max_length,
        dtype=message.dtype,
        engine=message.engine,
        batch_invariant=message.batch_invariant,
    )
