"""A wrapper of Ray's Jobs API. Every call blocks until the cluster answers, at most 10 s."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit

from protos.errors import InvalidInput, Unavailable, WrongState
from protos.extras import install_command
from protos.rpc.transport import is_loopback

_TIMEOUT_SECONDS = 10.0
_SHOWN_CHARS = 150
# The seconds from SIGTERM to SIGKILL for a driver: more than the driver gives its trainers.
_STOP_SECONDS = "20"

_T = TypeVar("_T")


@dataclass(frozen=True)
class UnknownRayJob:
    """The cluster has no such job."""


@dataclass(frozen=True)
class KnownRayJob:
    """The state of a job that the cluster knows.

    `code` is the exit code of its driver: -N for signal N, None if the driver is running or Ray
    recorded no code. `message` is Ray's description of the state.
    """

    is_ended: bool
    code: int | None = None
    message: str = ""


RayJobState = UnknownRayJob | KnownRayJob


class RayJobs:
    """Submits, stops and inspects the jobs of the cluster with dashboard `address` (a URL).

    The constructor raises InvalidInput if Ray is not installed or the address is not a URL. All
    methods raise Unavailable if the cluster does not answer, WrongState if the cluster refuses the
    call. Use one instance from one thread.
    """

    def __init__(self, address: str) -> None:
        host = _parse_host(address)
        if not host:
            raise InvalidInput(
                f"{address!r} is not the URL of a Ray dashboard",
                field="--ray",
                hint="use a URL such as http://127.0.0.1:8265",
            )
        self._address = address
        self._host = host
        self._connect = _client_class()
        self._client: Any = None

    def submit(self, name: str, entrypoint: str) -> None:
        """Start a job; no effect if the cluster already knows a job of this name."""
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_SECONDS}
        try:
            self._call_cluster(
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
        """Send SIGTERM to the job's driver; no effect if the job does not exist or has ended."""
        try:
            self._call_cluster(lambda client: client.stop_job(name))
        except WrongState as error:
            if "does not exist" not in error.message:
                raise

    def get_state(self, name: str) -> RayJobState:
        """Return the state of a job, or an UnknownRayJob if the cluster does not know the job."""
        try:
            job_info = self._call_cluster(lambda client: client.get_job_info(name))
        except WrongState as error:
            if "does not exist" in error.message:
                return UnknownRayJob()
            raise
        code = job_info.driver_exit_code
        # Ray runs the driver in a shell, which reports signal N as code 128 + N.
        code = 128 - code if code is not None and code > 128 else code
        return KnownRayJob(job_info.status.is_terminal(), code, job_info.message or "")

    def is_open(self) -> bool:
        """Return True if other machines can run programs on the cluster without a token."""
        answer = self._call_cluster(
            lambda client: client._do_request("GET", "/api/authentication_mode")
        )
        return "token" not in answer.text and not is_loopback(self._host)

    def _call_cluster(self, request: Callable[[Any], _T]) -> _T:
        try:
            if self._client is None:
                self._client = self._connect(self._address)
            return request(self._client)
        except OSError as error:  # the errors of `requests` are OSErrors, too
            raise Unavailable(
                "the Ray cluster cannot be reached",
                hint="check that the cluster runs and that --ray has its address",
            ) from error
        except Exception as error:
            raise WrongState(
                f"the Ray cluster refused the call: {summarize_error(error)}"
            ) from error


def _client_class() -> Callable[[str], Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Each of these would override the address on the command line.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    # Ray without its extra [default] can be imported but has no Jobs API.
    if not (find_spec("ray") and find_spec("aiohttp")):
        raise InvalidInput("Ray is not installed", field="--ray", hint=install_command("ray"))
    from ray.job_submission import JobSubmissionClient

    class Impatient(JobSubmissionClient):  # type: ignore[misc]
        """Ray's client with a timeout for every request, also in its constructor."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **options, timeout=_TIMEOUT_SECONDS)

    return Impatient


def _parse_host(address: str) -> str:
    """Return the host of an HTTP URL; "" if the address is not an HTTP URL."""
    try:
        parts = urlsplit(address)
    except ValueError:  # for example an unbalanced bracket
        return ""
    return (parts.scheme in ("http", "https") and parts.hostname) or ""


def summarize_error(error: Exception) -> str:
    """Return one line of an error: the last line of a traceback, otherwise the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip().strip(".")]
    if not lines:
        return type(error).__name__
    return lines[-1 if "Traceback" in str(error) else 0][:_SHOWN_CHARS]
