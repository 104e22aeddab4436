"""Certificates and keys: read from files, checked here, because gRPC would only fail later."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.errors import InvalidInput


@dataclass(frozen=True)
class TlsFiles:
    """What a server's command line names; all None: no TLS."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """TLS of a server; with `client_ca`, only for clients that it certified (mTLS)."""
    if files == TlsFiles():
        return None
    if files.cert is None or files.key is None:
        raise InvalidInput(
            "is missing",
            field="--tls-cert" if files.cert is None else "--tls-key",
            hint="TLS needs --tls-cert and --tls-key",
        )
    chain = _identity(files.cert, files.key, ("--tls-cert", "--tls-key"))
    roots = _roots(files.client_ca, "--tls-client-ca") if files.client_ca else None
    return grpc.ssl_server_credentials(
        [chain], root_certificates=roots, require_client_auth=roots is not None
    )


def client_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """TLS of a client. `ca` None: the public authorities. `cert` and `key`: for mTLS."""
    fields = ("$DISTILL_TLS_CERT", "$DISTILL_TLS_KEY")
    if (cert is None) != (key is None):
        raise InvalidInput(
            "a certificate needs its key, and a key its certificate",
            field=fields[cert is not None],
            hint="set both, or none",
        )
    private, chain = _identity(cert, key, fields) if cert and key else (None, None)
    roots = _roots(ca, "$DISTILL_TLS_CA") if ca else None
    return grpc.ssl_channel_credentials(roots, private, chain)


def _identity(cert: Path, key: Path, fields: tuple[str, str]) -> tuple[bytes, bytes]:
    """Private key and certificate chain, which belong together."""
    chain = read_file(cert, fields[0])
    # Its group may read it: that is how Kubernetes hands a key to a program that is not root.
    private = read_file(key, fields[1], secret=0o007)
    try:
        # With an empty password, an encrypted key is refused instead of asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInput(
            f"{cert} and {key} are no certificate and its unencrypted key",
            field=fields[0],
            hint="give two PEM files that were made together",
        ) from error
    return private, chain


def _roots(path: Path, field: str) -> bytes:
    data = read_file(path, field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInput(
            f"{path} holds no certificates", field=field, hint="give a PEM file"
        ) from error
    return data


def read_file(path: Path, field: str, *, secret: int = 0) -> bytes:
    """A file's bytes; raises InvalidInput, also when its mode has any bit of `secret`."""
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
