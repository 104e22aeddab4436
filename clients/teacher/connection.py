"""The connection of a client to one teacher, and the thread that keeps its stream open."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.teacher.pending_requests import PendingRequests
from clients.teacher.query import IDENTITY_KEY, LAST_TURN, TURN_KEY, identity_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError, Forbidden, InvalidInput, Unauthenticated, WrongState
from protos.rpc.channel import TEACHER_TOKEN, open_channel
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_MESSAGE_BYTES, backoff

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 2.0
# Errors that reconnecting does not fix.
PERMANENT_FAULTS = (InvalidInput, WrongState, Unauthenticated, Forbidden)
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class SharedIdentity:
    """The identity (fingerprint and version) that all teachers of a client must have.

    The first teacher that answers sets the identity. The methods are thread-safe, with the
    exceptions that their docstrings name.
    """

    def __init__(self, field: str, adapter: str = "") -> None:
        """`field`: the key or option that errors name. `adapter`: name of the client's adapter, or
        "".

        The fingerprint in the identity is that of the rows with this adapter.
        """
        self._field = field
        self._adapter = adapter
        self._lock = threading.Lock()
        self._expected_identity: str | None = None
        self._changes = 0

    @property
    def changes(self) -> int:
        """Number of weight updates by this client. Waits for the end of a running update."""
        with self._lock:
            return self._changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock during a weight update. Checks of teachers wait for its end."""
        with self._lock:
            self._changes += 1
            yield

    def require(self, info: teacher_pb2.TeacherInfo, name: str) -> None:
        """Raise WrongState if the identity in `info` differs from the expected identity.

        The first call sets the expected identity. `name`: the teacher's name in the error.
        """
        with self._lock:
            self.check(info, name)

    def of(self, info: teacher_pb2.TeacherInfo, name: str) -> str:
        """Return the identity in `info`, with the fingerprint for this client's adapter.

        `name`: the teacher's name in the error. Raises WrongState if the teacher does not have the
        adapter.
        """
        if not self._adapter:
            return identity_of(info.fingerprint, info.version)
        fingerprints = {adapter.name: adapter.fingerprint for adapter in info.adapters}
        if self._adapter not in fingerprints:
            available = (
                f"; its adapters are {', '.join(sorted(fingerprints))}" if fingerprints else ""
            )
            raise WrongState(
                f"the {name} has no adapter {self._adapter!r}{available}",
                field=self._field.replace("address", "adapter"),
                hint=f"start the teacher with --adapter {self._adapter}=DIR, or choose an"
                f" adapter of the teacher",
            )
        return identity_of(fingerprints[self._adapter], info.version)

    def check(self, info: teacher_pb2.TeacherInfo, name: str) -> None:
        """Do the same as `require`, without taking the lock. Call it inside `changing`."""
        identity = self.of(info, name)
        self._expected_identity = self._expected_identity or identity
        if identity != self._expected_identity:
            raise self.mismatch_error(identity, name)

    def mismatch_error(self, identity: str, name: str) -> WrongState:
        """Return the error for a teacher with another identity than the expected one.

        `name`: the teacher's name in the error.
        """
        return WrongState(
            f"the {name} is {identity}, but {self._expected_identity} was expected",
            field=self._field,
            hint="start the teacher with the weights that it had when the job started, or start a"
            " new job",
        )

    def adopt(self, fingerprint: str, version: int) -> None:
        """Set the expected identity after a weight update. Call it inside `changing`."""
        self._expected_identity = identity_of(fingerprint, version)


def not_a_teacher(error: grpc.RpcError, address: str, field: str = "") -> InvalidInput | None:
    """Return the InvalidInput error if a server does not know the teacher's methods.

    Returns None if `error` has another cause.
    """
    call: Any = error
    if call.code() is not grpc.StatusCode.UNIMPLEMENTED:
        return None
    return InvalidInput(
        f"the server at {address} is not a teacher",
        field=field,
        hint="give the HOST:PORT that distill-teacher printed",
    )


class TeacherConnection:
    """Sends requests from the queue to one teacher, and gives the answers to the queue.

    A thread keeps the stream open while the queue has unfinished requests. When the stream breaks,
    its unfinished requests return to the queue, and any connection may send them again. The stream
    is opened again after a random pause of at most 2 s.

    `connected`: True while the stream is open. `last_fault`: the error that ended the last stream.
    """

    def __init__(
        self,
        address: str,
        window: PendingRequests,
        identity: SharedIdentity,
        on_wrong_teacher: Callable[[DistillError], None],
        scope: str = "",
        background: bool = False,
    ) -> None:
        self.address = address
        self._background = background
        self.name = f"teacher at {address}"
        self.connected = False
        self.last_fault: DistillError | None = None
        self._window = window
        self._identity = identity
        self._on_wrong_teacher = on_wrong_teacher
        self._channel = open_channel(address, token=TEACHER_TOKEN, scope=scope)
        self.stub = teacher_pb2_grpc.TeacherStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._call: Any = None
        self._was_teacher = False
        self._failures = 0
        self._thread = threading.Thread(
            target=self._keep_streaming, name=f"teacher-{address}", daemon=True
        )

    def start(self) -> None:
        """Start the thread of the stream."""
        self._thread.start()

    def close(self) -> None:
        """Close the connection and join the thread.

        Close the queue before this call. Otherwise the thread does not end, and this call blocks.
        """
        self._channel.close()  # cancels the stream
        self._thread.join()

    def cancel_stream(self) -> None:
        """Cancel the stream. The thread opens a new stream when the queue has a request."""
        if self._call is not None:
            self._call.cancel()

    def get_info(self, call: Any = None) -> teacher_pb2.TeacherInfo:
        """Return the teacher's info, and check its identity.

        `call`: a call that `start_info_call` has started; None starts a new call. Raises RpcError
        if the teacher does not answer within 5 s, WrongState if its identity differs from that of
        the other teachers.
        """
        message: teacher_pb2.TeacherInfo = (call or self.start_info_call()).result()
        self._was_teacher = True
        self._identity.require(message, self.name)
        return message

    def query_info(self) -> teacher_pb2.TeacherInfo:
        """Return the teacher's info without a check.

        Raises RpcError if no answer arrives within 5 s.
        """
        message: teacher_pb2.TeacherInfo = self.start_info_call().result()
        return message

    def start_info_call(self, *, waits: bool = True) -> Any:
        """Start a call for the teacher's info, with a deadline of 5 s, and return the call.

        `waits`: True waits until the deadline for a teacher that does not listen yet. With False,
        the call to such a teacher fails at once.
        """
        return self.stub.GetInfo.future(
            teacher_pb2.GetInfoRequest(), timeout=CONNECT_SECONDS, wait_for_ready=waits
        )

    def start_health_check(self, seconds: float) -> Any:
        """Start a health check with a deadline of `seconds`, and return the call for `is_alive`.

        Raises ValueError if the connection is closed.
        """
        request = health_pb2.HealthCheckRequest()
        return self._health.Check.future(request, timeout=seconds, wait_for_ready=True)

    def _keep_streaming(self) -> None:
        while self._window.wait_for_work():
            changes = self._identity.changes
            fault = self._stream_until_fault()
            is_new = _without_numbers(fault) != _without_numbers(self.last_fault)
            if fault and is_new and not self._window.closed:
                log.warning("%s", fault)
            self.last_fault = fault
            # During its own weight update this client may see the teacher with a new identity.
            if isinstance(fault, PERMANENT_FAULTS) and self._identity.changes == changes:
                self._on_wrong_teacher(fault)
            self._window.wait_closed(backoff(self._failures + 1, 0.05, _MAX_BACKOFF_SECONDS))

    def _stream_until_fault(self) -> DistillError | None:
        """Run one stream to its end, and return its error.

        Returns None if the teacher ended the stream without an error.
        """
        self._failures += 1
        try:
            self._stream_answers(self.get_info())
        except grpc.RpcError as error:
            # A proxy in front of a restarting teacher may answer like a server that is no teacher.
            wrong_program = None if self._was_teacher else not_a_teacher(error, self.address)
            return wrong_program or fault_of(error, self.name)
        except WrongState as fault:
            return fault
        except ValueError:
            # grpc raises ValueError for a call on a closed channel.
            if not self._window.closed:
                raise
        return None

    def _stream_answers(self, info: teacher_pb2.TeacherInfo) -> None:
        identity = self._identity.of(info, self.name)
        stream = self._window.open(
            self.address, info.max_request_bytes or MAX_MESSAGE_BYTES, info.vocab_size
        )
        self.connected = True
        try:
            metadata = [(IDENTITY_KEY, identity)]
            if self._background:
                metadata.append((TURN_KEY, LAST_TURN))
            self._call = self.stub.Score(stream.requests(), metadata=tuple(metadata))
            for chunk in self._call:
                if chunk.version != info.version and not chunk.HasField("error"):
                    raise self._identity.mismatch_error(f"version {chunk.version}", self.name)
                stream.receive(chunk)
                self._failures = 0
        finally:
            self.connected = False
            self.cancel_stream()
            stream.end()


def _without_numbers(fault: DistillError | None) -> str:
    """Return the text of an error without digits, to compare errors.

    The message of a teacher that loads its model has a percentage, which changes.
    """
    return re.sub(r"\d", "", str(fault))


def is_alive(health_check: Any) -> bool:
    """Wait for a health check, and return whether the teacher answered it.

    The status in the answer does not matter: a teacher that is not serving yet is alive.
    """
    try:
        error = health_check.exception()
    except grpc.FutureCancelledError:
        return False
    return error is None or error.code() not in _NO_ANSWER
