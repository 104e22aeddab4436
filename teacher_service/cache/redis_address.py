"""Where Redis is and who we are there; the first talk with it."""

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
# The library would wait five seconds and try ten times. Protocol 2 needs no further rights.
OPTIONS: dict[str, Any] = {
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    "retry": None,
    "protocol": 2,
    "driver_info": None,
}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PROBE = "distill:probe"
_NEEDED = (("GETRANGE", _PROBE, 0, 0), ("SET", _PROBE, "", "NX", "EX", 1), ("DEL", _PROBE))


@dataclass(frozen=True)
class RedisAddress:
    """`url` as in `rediss://user@host:6379/0?ssl_ca_certs=/ca.pem`. Raises InvalidInput."""

    url: str
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("redis", "rediss") and parts.hostname and (parts.port or 1)
        except ValueError:
            known = False
        if not known:
            raise _refused("it is not a URL of Redis", "write redis://host:6379/0, or rediss://")
        if parts.password is not None and self.password is not None:
            raise _refused("two passwords are given", "keep DISTILL_REDIS_PASSWORD only")
        for name, values in parse_qs(parts.query).items():
            if not name.startswith("ssl_"):
                raise _refused(f"{name} cannot be set in the URL", "only ssl_... options can")
            if name in _FILES and not Path(values[0]).is_file():
                raise _refused(f"{name}: there is no file {values[0]}", "check the path")

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"Redis at {parts.hostname}:{parts.port or 6379}"


def greet(address: RedisAddress) -> None:
    """Use every right that will be needed. Raises InvalidInput when the server refuses one, or the
    URL has an option that does not exist; RedisError or OSError when it cannot be reached.
    """
    connection = _connection(address)
    try:
        connection.connect()
        for command in _NEEDED:
            connection.send_command(*command)
            connection.read_response()
    except OutOfMemoryError:
        pass  # what is there may still be read
    except (AuthenticationError, AuthorizationError, ResponseError) as error:
        raise _refused(
            f"{address} refuses: {error}",
            "check the user in the URL, DISTILL_REDIS_PASSWORD, and the user's rights",
        ) from error
    finally:
        connection.disconnect()


def _connection(address: RedisAddress) -> Any:
    try:
        pool = redis.ConnectionPool.from_url(address.url, password=address.password, **OPTIONS)
        # Past the pool, which takes what TLS sends by itself for an answer that nobody read.
        return pool.make_connection()
    except (TypeError, ValueError, RedisError) as error:
        raise _refused(
            f"the library does not take its options: {error}",
            "ssl_... options are those of redis-py, and only of rediss://",
        ) from error


def _refused(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field="--redis-url", hint=hint)
