"""TLS credentials from PEM files, checked when read: gRPC would report errors only in a call."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.errors import InvalidInput


@dataclass(frozen=True)
class TlsFiles:
    """The TLS files named on a server's command line. If all are None, the server uses no TLS."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """Return the TLS credentials of a server, or None if no file is named.

    With `client_ca`, a client must present a certificate that this authority signed (mTLS). Raises
    InvalidInput if a file is missing, unreadable or invalid.
    """
    if files == TlsFiles():
        return None
    if files.cert is None or files.key is None:
        raise InvalidInput(
            "is missing",
            field="--tls-cert" if files.cert is None else "--tls-key",
            hint="give both --tls-cert and --tls-key",
        )
    chain = _read_identity(files.cert, files.key, ("--tls-cert", "--tls-key"))
    roots = _read_roots(files.client_ca, "--tls-client-ca") if files.client_ca else None
    return grpc.ssl_server_credentials(
        [chain], root_certificates=roots, require_client_auth=roots is not None
    )


def client_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return the TLS credentials of a client.

    `ca` has the accepted certificate authorities; None means the public authorities. `cert` and
    `key` identify the client (mTLS). Raises InvalidInput if only `cert` or only `key` is given, or
    if a file is unreadable or invalid.
    """
    fields = ("$DISTILL_TLS_CERT", "$DISTILL_TLS_KEY")
    if (cert is None) != (key is None):
        raise InvalidInput(
            "is missing",
            field=fields[cert is not None],
            hint=f"set both {fields[0]} and {fields[1]}, or neither",
        )
    private, chain = _read_identity(cert, key, fields) if cert and key else (None, None)
    roots = _read_roots(ca, "$DISTILL_TLS_CA") if ca else None
    return grpc.ssl_channel_credentials(roots, private, chain)


def _read_identity(cert: Path, key: Path, fields: tuple[str, str]) -> tuple[bytes, bytes]:
    """Return the private key and the certificate chain after checking that they match."""
    chain = read_file(cert, fields[0])
    # The group may read the key: Kubernetes mounts a key this way for a program that is not root.
    private = read_file(key, fields[1], secret=0o007)
    try:
        # With an empty password an encrypted key is refused; without one, ssl would prompt for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInput(
            f"{cert} and {key} are not a certificate and its unencrypted private key",
            field=fields[0],
            hint="give a PEM certificate and its PEM key",
        ) from error
    return private, chain


def _read_roots(path: Path, field: str) -> bytes:
    data = read_file(path, field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInput(
            f"{path} holds no certificate", field=field, hint="give a PEM file of certificates"
        ) from error
    return data


def read_file(path: Path, field: str, *, secret: int = 0) -> bytes:
    """Return the bytes of a file.

    Raises InvalidInput, naming `field`, if the file cannot be read or if its mode has any bit of
    `secret` (an octal mask such as 0o077).
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & secret:
                raise InvalidInput(
                    f"{path} can be read by other users (mode {mode & 0o777:o})",
                    field=field,
                    hint=f"chmod 600 {path}",
                )
            return file.read()
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}",
            field=field,
            hint="check the path",
        ) from error
