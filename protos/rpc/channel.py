"""How a client reaches a server: `HOST:PORT`, or `https://HOST:PORT` for TLS, and its token.

Secrets come from the environment, never from an argument or a job file:

    DISTILL_TOKEN, DISTILL_TOKEN_FILE                  for the distill server
    DISTILL_TEACHER_TOKEN, DISTILL_TEACHER_TOKEN_FILE  for teachers
    DISTILL_TLS_CA                                     who certifies servers; else the public ones
    DISTILL_TLS_CERT, DISTILL_TLS_KEY                  who we are, where servers ask (mTLS)
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from protos.auth.access import require_token
from protos.auth.scoped_token import scoped_token
from protos.auth.tls import client_credentials, read_file
from protos.errors import InvalidInput
from protos.rpc.transport import CHANNEL_OPTIONS, is_loopback

SERVER_TOKEN = "DISTILL_TOKEN"
TEACHER_TOKEN = "DISTILL_TEACHER_TOKEN"


def open_channel(address: str, *, token: str, scope: str = "") -> grpc.Channel:
    """A channel that connects when it is first used. `token`: name of the variable with it.

    With a `scope`, what travels is a token derived for it, which can do no more than ask teachers.
    Raises InvalidInput for files that cannot be read, and for a token that would be sent in the
    clear to another machine.
    """
    scheme, _, rest = address.rpartition("://")
    secret = token_of(token)
    if scope and secret:
        secret = scoped_token(secret, scope, 0)
    if scheme == "https":
        return _secure(rest, client_credentials(*_tls_files()), secret)
    if scheme not in ("", "http"):
        raise InvalidInput(
            f"cannot call {address}", hint="give HOST:PORT, or https://HOST:PORT for TLS"
        )
    if not secret:
        return grpc.insecure_channel(rest, options=CHANNEL_OPTIONS)
    if not is_loopback(_host(rest)):
        raise InvalidInput(
            f"{token} would be sent in the clear to {address}",
            hint=f"give https://{rest}, or unset the token",
        )
    # gRPC itself refuses to use these for a connection that leaves the machine.
    return _secure(rest, grpc.local_channel_credentials(), secret)


def _secure(target: str, credentials: grpc.ChannelCredentials, token: str) -> grpc.Channel:
    if token:
        bearer = grpc.access_token_call_credentials(token)
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def _host(target: str) -> str:
    return target.rpartition(":")[0].strip("[]")


def token_of(variable: str) -> str:
    """The token in the variable, or in the file that VARIABLE_FILE names; "" without either.

    Raises InvalidInput for a file that cannot be read, and for what is no token.
    """
    token = os.environ.get(variable, "").strip()
    file = _path(f"{variable}_FILE")
    if not token and file is not None:
        data = read_file(file, f"${variable}_FILE", secret=0o077)
        token = data.decode("utf-8", "replace").strip()
    if token:
        require_token(token, f"${variable}")
    return token


def _tls_files() -> tuple[Path | None, Path | None, Path | None]:
    return _path("DISTILL_TLS_CA"), _path("DISTILL_TLS_CERT"), _path("DISTILL_TLS_KEY")


def _path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None
