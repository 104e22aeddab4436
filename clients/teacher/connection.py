"""One teacher of a client: its connection and its stream, kept up by a thread."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.teacher.pending_requests import ScoreWindow
from clients.teacher.query import IDENTITY_KEY, identity_of
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError, Forbidden, Unauthenticated, WrongState
from protos.rpc.channel import TEACHER_TOKEN, open_channel
from protos.rpc.statuses import fault_of

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 2.0
# Waiting does not mend these.
_LASTING = (WrongState, Unauthenticated, Forbidden)
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class SharedIdentity:
    """The fingerprint and version that all teachers of a client have: the first one decides."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._lock = threading.Lock()
        self._expected: str | None = None
        self._changes = 0

    @property
    def changes(self) -> int:
        """How often somebody changed the weights; waits for who does it now."""
        with self._lock:
            return self._changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the teacher gets new weights: nobody else looks at it."""
        with self._lock:
            self._changes += 1
            yield

    def require(self, info: teacher_pb2.TeacherInfo, name: str) -> None:
        """Raises WrongState if `info` is of another teacher than before."""
        with self._lock:
            self.check(info, name)

    def check(self, info: teacher_pb2.TeacherInfo, name: str) -> None:
        """`require` within `changing`."""
        identity = identity_of(info.fingerprint, info.version)
        self._expected = self._expected or identity
        if identity != self._expected:
            raise self.other(identity, name)

    def other(self, identity: str, name: str) -> WrongState:
        """The fault of a teacher that is not the expected one."""
        return WrongState(
            f"the {name} is now {identity}, it was {self._expected}",
            field=self._field,
            hint="start it with the weights the job began with, or start a new job",
        )

    def adopt(self, fingerprint: str, version: int) -> None:
        """Within `changing`: what the teacher is from now on."""
        self._expected = identity_of(fingerprint, version)


class TeacherLane:
    """Carries requests of a window to one teacher and answers back.

    A broken stream gives its unfinished requests back to the window, for whoever is there first,
    and is opened again after a jittered pause of at most 2 s.
    """

    def __init__(
        self,
        address: str,
        window: ScoreWindow,
        identity: SharedIdentity,
        on_wrong_teacher: Callable[[DistillError], None],
        scope: str = "",
    ) -> None:
        self.address = address
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
        self._failures = 0
        self._thread = threading.Thread(
            target=self._keep_streaming, name=f"teacher-{address}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._channel.close()  # cancels the stream
        self._thread.join()

    def cut(self) -> None:
        """End the stream; the next request opens another."""
        if self._call is not None:
            self._call.cancel()

    def get_info(self) -> teacher_pb2.TeacherInfo:
        """What the teacher is. Raises RpcError after 5 s without an answer, WrongState if it is not
        like the others.
        """
        message = self.ask()
        self._identity.require(message, self.name)
        return message

    def ask(self) -> teacher_pb2.TeacherInfo:
        """What the teacher says it is. Raises RpcError after 5 s without an answer."""
        return self.stub.GetInfo(
            teacher_pb2.GetInfoRequest(), timeout=CONNECT_SECONDS, wait_for_ready=True
        )

    def ask_health(self, seconds: float) -> Any:
        """The call of a health check, for `lives`. Raises ValueError on a closed lane."""
        request = health_pb2.HealthCheckRequest()
        return self._health.Check.future(request, timeout=seconds, wait_for_ready=True)

    def _keep_streaming(self) -> None:
        while self._window.wait_for_work():
            changes = self._identity.changes
            fault = self._stream_until_fault()
            if fault and str(fault) != str(self.last_fault) and not self._window.closed:
                log.warning("%s", fault)
            self.last_fault = fault
            # Who changes the weights finds itself at the wrong teacher for a moment.
            if isinstance(fault, _LASTING) and self._identity.changes == changes:
                self._on_wrong_teacher(fault)
            backoff = min(_MAX_BACKOFF_SECONDS, 0.05 * 2**self._failures)
            self._window.wait_closed(backoff * random.uniform(0.5, 1.0))

    def _stream_until_fault(self) -> DistillError | None:
        """One stream, from connection to end; None when the teacher ended it in good order."""
        self._failures += 1
        try:
            self._carry(self.get_info())
        except grpc.RpcError as error:
            return fault_of(error, self.name)
        except WrongState as fault:
            return fault
        except ValueError:
            # What grpc says to a call on a closed channel.
            if not self._window.closed:
                raise
        return None

    def _carry(self, info: teacher_pb2.TeacherInfo) -> None:
        identity = identity_of(info.fingerprint, info.version)
        stream = self._window.open()
        self.connected = True
        try:
            self._call = self.stub.Score(stream.requests(), metadata=((IDENTITY_KEY, identity),))
            for chunk in self._call:
                if chunk.version != info.version and not chunk.HasField("error"):
                    raise self._identity.other(f"version {chunk.version}", self.name)
                stream.receive(chunk)
                self._failures = 0
        finally:
            self.connected = False
            self.cut()
            stream.end()


def lives(health_check: Any) -> bool:
    """Waits for a health check: whether the teacher answered anything at all, serving or not."""
    try:
        error = health_check.exception()
    except grpc.FutureCancelledError:
        return False
    return error is None or error.code() not in _NO_ANSWER
