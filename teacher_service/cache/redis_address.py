"""The address and credentials of a Redis server, and a check of the access rights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from protos.errors import InvalidInput

TIMEOUT_SECONDS = 0.2
# By default, redis-py waits five seconds and tries ten times. Protocol 2 needs no further access
# rights.
OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    "retry": None,
    "protocol": 2,
    "driver_info": None,
}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PROBE = "distill:probe"
_REQUIRED_COMMANDS = (
    ("GETRANGE", _PROBE, 0, 0),
    ("SET", _PROBE, "", "NX", "EX", 1),
    ("DEL", _PROBE),
)


@dataclass(frozen=True)
class RedisAddress:
    """A Redis URL such as `rediss://user@host:6379/0?ssl_ca_certs=/ca.pem`, and its password.

    str() contains no credentials. Raises InvalidInput if the URL is malformed, sets an option that
    is not allowed, names a missing file, or has a password besides `password`.
    """

    url: str
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in ("redis", "rediss") and parts.hostname and (parts.port or 1)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise _url_error(
                "this is not a Redis URL", "write redis://host:6379/0, or rediss:// for TLS"
            )
        if parts.password is not None and self.password is not None:
            raise _url_error(
                "both the URL and DISTILL_REDIS_PASSWORD have a password",
                "remove the password from the URL",
            )
        for name, values in parse_qs(parts.query).items():
            if not name.startswith("ssl_"):
                raise _url_error(
                    f"the URL cannot set {name}",
                    "remove this option; only ssl_... options are allowed",
                )
            if name in _FILES and not Path(values[0]).is_file():
                raise _url_error(f"{name}: there is no file {values[0]}", "check the path")

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"Redis at {parts.hostname}:{parts.port or 6379}"


def check_access(address: RedisAddress) -> None:
    """Connect once and use every access right that the cache needs. Blocks.

    Raises InvalidInput if the server denies access or a right, or if redis-py rejects an option of
    the URL; RedisError or OSError if the server cannot be reached.
    """
    connection = _make_connection(address)
    try:
        connection.connect()
        for command in _REQUIRED_COMMANDS:
            connection.send_command(*command)
            connection.read_response()
    except OutOfMemoryError:
        pass  # the stored rows can still be read
    except (AuthenticationError, AuthorizationError, ResponseError) as error:
        raise _url_error(
            f"{address} denies access: {error}",
            "check the user in the URL, DISTILL_REDIS_PASSWORD, and the user's access rights",
        ) from error
    finally:
        connection.disconnect()


def _make_connection(address: RedisAddress) -> Any:
    try:
        pool = redis.ConnectionPool.from_url(address.url, password=address.password, **OPTIONS)
        # Do not take a connection of the pool: the pool mistakes bytes that TLS sends by itself for
        # an unread reply.
        return pool.make_connection()
    except (TypeError, ValueError, RedisError) as error:
        raise _url_error(
            f"redis-py rejects an option of the URL: {error}",
            "use the ssl_... options of redis-py, and only with rediss://",
        ) from error


def _url_error(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field="--redis-url", hint=hint)
