"""The exceptions that users can see: one class per category, on the server and on the client.

An exception has a text about the problem (`message`), the wrong key or option (`field`), and the
remedy (`hint`). Servers convert exceptions to gRPC statuses with `google.rpc.ErrorInfo`
(`rpc/statuses.py`). Clients convert statuses back to exceptions. The CLI prints the exception and
exits with its `exit_code`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """The exit codes of the `distill` command."""

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
    """The category of an exception. Each value is also the name of the gRPC status."""

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
    """Base class of all categories. Only its subclasses are raised.

    `code` and `exit_code` are class attributes. `str(error)` is "FIELD: MESSAGE; HINT".
    """

    code = ErrorCode.INTERNAL
    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        """Create the exception.

        `message` says what is wrong, `field` names the key, option or variable that is wrong, and
        `hint` says what to do next. The texts are sent to callers, so they must hold no secret.
        """
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint

    def __str__(self) -> str:
        prefix = f"{self.field}: " if self.field else ""
        suffix = f"; {self.hint}" if self.hint else ""
        return f"{prefix}{self.message}{suffix}"


class InvalidInput(DistillError, ValueError):
    """The caller's input is wrong; repeating the call cannot succeed."""

    code = ErrorCode.INVALID_ARGUMENT
    exit_code = ExitCode.USAGE


class Unauthenticated(DistillError, PermissionError):
    """The call needs a token, and has no token or one that the server does not accept."""

    code = ErrorCode.UNAUTHENTICATED
    exit_code = ExitCode.REFUSED


class Forbidden(DistillError, PermissionError):
    """The token is valid, but its role does not allow this call."""

    code = ErrorCode.PERMISSION_DENIED
    exit_code = ExitCode.REFUSED


class NotFound(DistillError, LookupError):
    """The job, file, checkpoint or attempt does not exist."""

    code = ErrorCode.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class WrongState(DistillError, RuntimeError):
    """The call is not possible now: a job's state forbids it, or two parts do not match."""

    code = ErrorCode.FAILED_PRECONDITION
    exit_code = ExitCode.WRONG_STATE


class Overloaded(DistillError, RuntimeError):
    """A queue or quota is full; the same call may succeed later.

    The caller should wait `retry_after_ms` milliseconds before it retries.
    """

    code = ErrorCode.RESOURCE_EXHAUSTED
    exit_code = ExitCode.UNREACHABLE
    retry_after_ms = 1000


class Unavailable(DistillError, ConnectionError):
    """A server cannot be reached, or is shutting down; the same call may succeed later."""

    code = ErrorCode.UNAVAILABLE
    exit_code = ExitCode.UNREACHABLE


class TimedOut(DistillError, TimeoutError):
    """A deadline has passed."""

    code = ErrorCode.DEADLINE_EXCEEDED
    exit_code = ExitCode.TIMED_OUT


class Corrupt(DistillError, ValueError):
    """Bytes do not match their checksum, or values are impossible. The data was not used."""

    code = ErrorCode.DATA_LOSS
    exit_code = ExitCode.JOB_FAILED


class InternalFault(DistillError, RuntimeError):
    """A defect in this software.

    The message has an id. The server's log has the traceback with the same id.
    """


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


# Errors of services and machines, not of the job: the unchanged job may succeed later.
_INFRASTRUCTURE = frozenset(error.code.value for error in (Unavailable, Overloaded, TimedOut))


def is_infrastructure(code: str) -> bool:
    """Return True if the ErrorCode `code` names an error of services or machines, not of a job."""
    return code in _INFRASTRUCTURE


def error_of(code: str, message: str, *, field: str = "", hint: str = "") -> DistillError:
    """Return an exception of the category with the ErrorCode `code`.

    If no ErrorCode has this name, the exception is an InternalFault.
    """
    category = next((c for c in CATEGORIES if c.code == code), InternalFault)
    return category(message, field=field, hint=hint)
