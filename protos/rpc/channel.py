"""gRPC channels to `HOST:PORT`, or to `https://HOST:PORT` with TLS; they send the client's token.

Secrets come from environment variables, never from an argument or a job file:

    DISTILL_TOKEN, DISTILL_TOKEN_FILE                  token for the distill server
    DISTILL_TEACHER_TOKEN, DISTILL_TEACHER_TOKEN_FILE  token for teacher services
    DISTILL_ROLLOUTS_TOKEN, ..._FILE                   token for rollout services
    DISTILL_TLS_CA                                     authorities of server certificates; if unset,
                                                       the public authorities
    DISTILL_TLS_CERT, DISTILL_TLS_KEY                  the client's own certificate and key (mTLS)
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from protos.auth.access import require_token
from protos.auth.scoped_token import scoped_token
from protos.auth.tls import client_credentials, read_file
from protos.errors import InvalidInput, WrongState
from protos.rpc.transport import CHANNEL_OPTIONS, is_loopback

SERVER_TOKEN = "DISTILL_TOKEN"
TEACHER_TOKEN = "DISTILL_TEACHER_TOKEN"
ROLLOUTS_TOKEN = "DISTILL_ROLLOUTS_TOKEN"
# The process that opened the first channel; 0 before. gRPC does not work in its forked children.
_first_process = 0
_DEFAULT_PORTS = {SERVER_TOKEN: 50051, TEACHER_TOKEN: 50052, ROLLOUTS_TOKEN: 50053}


def open_channel(address: str, *, token: str, scope: str = "") -> grpc.Channel:
    """Return a channel to `address`. The channel connects on first use.

    - `token`: name of the environment variable with the token
    - `scope`: if given, such as "preflight", the channel sends a token that is derived for this
      scope. A derived token only allows reads: from teachers or, if `token` is ROLLOUTS_TOKEN, of
      the info of rollout services.

    Raises InvalidInput if the address has an unknown scheme or no port, if a file cannot be read,
    or if the token would be sent unencrypted to another machine. Raises the errors of
    `require_unforked`.
    """
    global _first_process
    require_unforked()
    _first_process = os.getpid()
    scheme, _, target = address.rpartition("://")
    secret = token_of(token)
    if scope and secret:
        secret = scoped_token(secret, scope, 0, rollouts=token == ROLLOUTS_TOKEN)
    if scheme == "https":
        return _secure_channel(target, client_credentials(*_tls_files()), secret)
    if scheme not in ("", "http"):
        raise InvalidInput(
            f"{address} has an unknown scheme", hint="give HOST:PORT, or https://HOST:PORT for TLS"
        )
    if not target.rpartition(":")[2].isdigit():
        # Without a port, gRPC would use port 443.
        port = _DEFAULT_PORTS.get(token, 50051)
        raise InvalidInput(
            f"{address!r} has no port",
            hint=f"give HOST:PORT, such as {target or 'localhost'}:{port}",
        )
    if not secret:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    if not is_loopback(_host_of(target)):
        raise InvalidInput(
            f"{token} would be sent unencrypted to {address}",
            hint=f"use https://{target}, or unset the token",
        )
    # gRPC itself refuses local credentials for a connection that leaves the machine.
    return _secure_channel(target, grpc.local_channel_credentials(), secret)


def is_forked() -> bool:
    """Return whether this process was forked from a process that had opened a channel."""
    return _first_process not in (0, os.getpid())


def require_unforked() -> None:
    """Raise WrongState in a process that was forked from a process that had opened a channel.

    In such a process, calls on any channel would block forever, and would break connections of the
    parent process.
    """
    if is_forked():
        raise WrongState(
            f"this process was forked from a process with connections ({_first_process}), and gRPC"
            " does not work in such a child",
            hint="start the child with multiprocessing's method 'spawn', or make the first client"
            " in the child",
        )


def open_cluster_channel(
    address: str, *, token: str
) -> tuple[grpc.Channel, tuple[tuple[str, str], ...]]:
    """Return a channel to a service that a runner has started on its cluster, and metadata.

    The caller must send the metadata with every call. For an address on this machine, the channel
    comes from `open_channel`, and the metadata is empty. For another machine, the connection has no
    TLS, like the connections between the nodes of a Ray cluster, and the metadata contains the
    token. This is acceptable, because the token was derived for a single attempt of a job. `token`:
    name of the environment variable with the token.

    Raises the InvalidInput errors of `open_channel` and `token_of`.
    """
    if is_loopback(_host_of(address)):
        return open_channel(address, token=token), ()
    channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return channel, (("authorization", f"Bearer {token_of(token)}"),)


def _secure_channel(target: str, credentials: grpc.ChannelCredentials, token: str) -> grpc.Channel:
    if token:
        bearer = grpc.access_token_call_credentials(token)
        credentials = grpc.composite_channel_credentials(credentials, bearer)
    return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def _host_of(target: str) -> str:
    return target.rpartition(":")[0].strip("[]")


def token_of(variable: str) -> str:
    """Return the token in the environment variable, or in the file that VARIABLE_FILE names.

    `variable`: name of the environment variable. Returns "" if neither is set. Raises InvalidInput
    if the file cannot be read, or if its content is not a valid token.
    """
    token = os.environ.get(variable, "").strip()
    file = _path_in(f"{variable}_FILE")
    if not token and file is not None:
        data = read_file(file, f"${variable}_FILE", secret=0o077)
        token = data.decode("utf-8", "replace").strip()
    if token:
        require_token(token, f"${variable}", "copy a token of the server's token file")
    return token


def _tls_files() -> tuple[Path | None, Path | None, Path | None]:
    return _path_in("DISTILL_TLS_CA"), _path_in("DISTILL_TLS_CERT"), _path_in("DISTILL_TLS_KEY")


def _path_in(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None
