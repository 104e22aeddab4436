"""Ray's Jobs API in our words. Every call waits for the cluster, seconds at most."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from protos.errors import InvalidInput, Unavailable, WrongState
from protos.extras import install_command

_TIMEOUT_SECONDS = 10.0
_SHOWN_CHARS = 150
# From SIGTERM to a driver until Ray kills it: it gives its trainers less.
_STOP_SECONDS = "20"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Absent:
    """The cluster has no such job."""


@dataclass(frozen=True)
class Present:
    """`code`: of the driver, minus a signal's number; None where it had no end of its own."""

    ended: bool
    code: int | None = None
    message: str = ""


Answer = Absent | Present


class RayJobs:
    """The jobs of the cluster whose dashboard is at `address`, http://HOST:PORT.

    Raises InvalidInput without Ray or for another address. All methods raise Unavailable when
    nobody answers, WrongState when the cluster refuses.
    """

    def __init__(self, address: str) -> None:
        host = _host(address)
        if not host:
            raise InvalidInput(
                f"{address!r} is no address of a Ray dashboard",
                field="--ray",
                hint="it is like http://127.0.0.1:8265",
            )
        self._address = address
        self._host = host
        self._connect = _client_class()
        self._client: Any = None

    def submit(self, name: str, entrypoint: str) -> None:
        """Start a job, once: of a name that the cluster knows, it starts no second one."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS}
        try:
            self._asked(
                lambda client: client.submit_job(
                    entrypoint=entrypoint,
                    submission_id=name,
                    runtime_env={"env_vars": variables},
                )
            )
        except WrongState as error:
            if "already exists" not in error.message:
                raise

    def stop(self, name: str) -> None:
        """SIGTERM for its driver. Harmless when there is no such job, or it is over."""
        try:
            self._asked(lambda client: client.stop_job(name))
        except WrongState as error:
            if "does not exist" not in error.message:
                raise

    def look(self, name: str) -> Answer:
        try:
            found = self._asked(lambda client: client.get_job_info(name))
        except WrongState as error:
            if "does not exist" in error.message:
                return Absent()
            raise
        code = found.driver_exit_code
        # A shell tells a signal so.
        code = 128 - code if code is not None and code > 128 else code
        return Present(found.status.is_terminal(), code, found.message or "")

    def is_open(self) -> bool:
        """Whether others than this machine may run programs there without a token."""
        answer = self._asked(lambda client: client._do_request("GET", "/api/authentication_mode"))
        return "token" not in answer.text and not _is_loopback(self._host)

    def _asked(self, question: Callable[[Any], _T]) -> _T:
        try:
            if self._client is None:
                self._client = self._connect(self._address)
            return question(self._client)
        except OSError as error:  # of `requests`, too
            raise Unavailable("the Ray cluster cannot be reached", hint="is it up?") from error
        except Exception as error:
            raise WrongState(f"the Ray cluster refuses: {shown(error)}") from error


def _client_class() -> Callable[[str], Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Each would overrule the address on the command line.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    # Ray without the extra [default] can be imported, and has no Jobs API.
    if not (find_spec("ray") and find_spec("aiohttp")):
        raise InvalidInput(
            "Ray is not installed", field="--ray", hint=install_command("ray")
        )
    from ray.job_submission import JobSubmissionClient

    class Impatient(JobSubmissionClient):  # type: ignore[misc]
        """Ray's client would wait for ever for a machine that is gone, and asks when it is made."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **options, timeout=_TIMEOUT_SECONDS)

    return Impatient


def _host(address: str) -> str:
    """Of a URL; "" for what is none."""
    try:
        parts = urlsplit(address)
    except ValueError:  # a bracket without its other one
        return ""
    return (parts.scheme in ("http", "https") and parts.hostname) or ""


def shown(error: Exception) -> str:
    """The line that says something: of a traceback of Ray's the last, of a sentence the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip().strip(".")]
    if not lines:
        return type(error).__name__
    return lines[-1 if "Traceback" in str(error) else 0][:_SHOWN_CHARS]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
