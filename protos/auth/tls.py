"""TLS credentials from PEM files.

The files are checked when they are read, because gRPC would report errors only in a call. A server
can read its files again (`ServerTls.reload`), for example after a certificate was renewed.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.errors import InvalidInput
from protos.operating_system import IS_WINDOWS


@dataclass(frozen=True)
class TlsFiles:
    """The TLS files in a server's options. If all of them are None, the server uses no TLS."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None


class ServerTls:
    """The TLS of a server, for its gRPC and HTTP ports. Thread-safe.

    A new connection gets the certificate that was read last. With `client_ca`, each client must
    present a certificate that this authority has signed (mTLS).
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises InvalidInput if a file is missing, unreadable or invalid."""
        if files.cert is None or files.key is None:
            raise InvalidInput(
                "is missing",
                field="--tls-cert" if files.cert is None else "--tls-key",
                hint="give both --tls-cert and --tls-key",
            )
        self._cert, self._key, self._client_ca = files.cert, files.key, files.client_ca
        self.reload()

    @property
    def paths(self) -> Sequence[Path]:
        """The paths of the TLS files, without those that are not set."""
        return [path for path in (self._cert, self._key, self._client_ca) if path is not None]

    def reload(self) -> None:
        """Read the files again. New connections then use the new certificates.

        Raises InvalidInput if a file is missing, unreadable or invalid. New connections then get
        the previous certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        chain = _read_identity(self._cert, self._key, ("--tls-cert", "--tls-key"), context)
        roots = None
        if self._client_ca is not None:
            roots = _read_roots(self._client_ca, "--tls-client-ca")
            context.load_verify_locations(cadata=roots.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
        self._grpc_certificates = grpc.ssl_server_certificate_configuration([chain], roots)
        self._context = context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port."""
        served_certificates = self._grpc_certificates

        def fetch_change() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served_certificates
            if self._grpc_certificates is served_certificates:
                return None  # gRPC keeps its certificates
            served_certificates = self._grpc_certificates
            return served_certificates

        return grpc.dynamic_ssl_server_credentials(
            served_certificates,
            fetch_change,  # type: ignore[arg-type]
            require_client_authentication=self._client_ca is not None,
        )

    def http_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP port."""
        context = self._context

        def use_last_context(
            connection: ssl.SSLObject, name: str | None, first_context: ssl.SSLContext
        ) -> None:
            connection.context = self._context

        context.sni_callback = use_last_context  # called for each connection, with or without SNI
        return context


def client_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return the TLS credentials of a client.

    - `ca`: file with the certificate authorities that the client accepts; None: the public
      authorities
    - `cert`, `key`: files that identify the client (mTLS); None: the client has no identity

    Raises InvalidInput if only one of `cert` and `key` is given, or if a file is unreadable or
    invalid.
    """
    fields = ("$DISTILL_TLS_CERT", "$DISTILL_TLS_KEY")
    if (cert is None) != (key is None):
        raise InvalidInput(
            "is missing",
            field=fields[cert is not None],
            hint=f"set both {fields[0]} and {fields[1]}, or neither",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    private, chain = _read_identity(cert, key, fields, context) if cert and key else (None, None)
    roots = _read_roots(ca, "$DISTILL_TLS_CA") if ca else None
    return grpc.ssl_channel_credentials(roots, private, chain)


def _read_identity(
    cert: Path, key: Path, fields: tuple[str, str], context: ssl.SSLContext
) -> tuple[bytes, bytes]:
    """Load a private key and its certificate chain into `context`, and return both as PEM bytes.

    `fields`: names of the options for `cert` and `key`, for errors. Raises InvalidInput if the key
    and the certificate do not belong together.
    """
    chain = read_file(cert, fields[0])
    # The group may read the key: Kubernetes mounts a key this way for a program that is not root.
    private = read_file(key, fields[1], secret=0o007)
    try:
        # With an empty password an encrypted key is refused; without one, ssl would prompt for it.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
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

    - `field`: the option that errors name
    - `secret`: permission bits that the file must not have, such as 0o077; 0: any permissions

    Raises InvalidInput if the file cannot be read, or has one of these bits.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & secret and not IS_WINDOWS:  # which has no modes
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
