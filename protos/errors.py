"""Every fault a user can meet: one exception per category, the same on both ends of a connection.

A fault says what went wrong, where (`field`) and what to do next (`hint`). Servers turn it into a
gRPC status with `google.rpc.ErrorInfo` at one boundary (`transport.py`); clients turn it back; the
CLI prints it and exits with `exit_code`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What the `distill` command returns to the shell."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    JOB_CANCELLED = 5
    WRONG_STATE = 6
    TIMED_OUT = 7
    REFUSED = 8
    INTERRUPTED = 130


class ErrorCode(StrEnum):
    """The category of a fault, and the name of its gRPC status."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    DATA_LOSS = "DATA_LOSS"
    INTERNAL = "INTERNAL"


class DistillError(Exception):
    """Base of every fault; never raised itself."""

    code = ErrorCode.INTERNAL
    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        then = f"; {self.hint}" if self.hint else ""
        return f"{where}{self.message}{then}"


class InvalidInput(DistillError, ValueError):
    """The caller's input is wrong; sending it again cannot help."""

    code = ErrorCode.INVALID_ARGUMENT
    exit_code = ExitCode.USAGE


class Unauthenticated(DistillError, PermissionError):
    """The server asks for a token, and got none that it knows."""

    code = ErrorCode.UNAUTHENTICATED
    exit_code = ExitCode.REFUSED


class Forbidden(DistillError, PermissionError):
    """The token is known, and its role may not do this."""

    code = ErrorCode.PERMISSION_DENIED
    exit_code = ExitCode.REFUSED


class NotFound(DistillError, LookupError):
    """No such job, file, checkpoint or attempt."""

    code = ErrorCode.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class WrongState(DistillError, RuntimeError):
    """Not possible now: a job's state forbids it, or two parts do not fit together."""

    code = ErrorCode.FAILED_PRECONDITION
    exit_code = ExitCode.WRONG_STATE


class Overloaded(DistillError, RuntimeError):
    """A queue or quota is full; the same call may go through later."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    exit_code = ExitCode.UNREACHABLE
    retry_after_ms = 1000  # what the caller is told


class Unavailable(DistillError, ConnectionError):
    """A server cannot be reached, or is going away; the same call may go through later."""

    code = ErrorCode.UNAVAILABLE
    exit_code = ExitCode.UNREACHABLE


class TimedOut(DistillError, TimeoutError):
    """A deadline ran out."""

    code = ErrorCode.DEADLINE_EXCEEDED
    exit_code = ExitCode.TIMED_OUT


class Corrupt(DistillError, ValueError):
    """Bytes do not match their checksum, or numbers are impossible: nothing of them was used."""

    code = ErrorCode.DATA_LOSS
    exit_code = ExitCode.JOB_FAILED


class InternalFault(DistillError, RuntimeError):
    """A defect of ours; the id in the message is also in the server's log."""


CATEGORIES: tuple[type[DistillError], ...] = (
    InvalidInput,
    Unauthenticated,
    Forbidden,
    NotFound,
    WrongState,
    Overloaded,
    Unavailable,
    TimedOut,
    Corrupt,
    InternalFault,
)


def error_of(code: str, message: str, *, field: str = "", hint: str = "") -> DistillError:
    """The exception of a category by its code's name; an unknown name is an InternalFault."""
    category = next((c for c in CATEGORIES if c.code == code), InternalFault)
    return category(message, field=field, hint=hint)
