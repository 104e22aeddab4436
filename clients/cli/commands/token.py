"""`distill token`: makes a secret for a server's token file."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Annotated

import typer

from clients.cli.settings import settings_of

_TOKEN_BYTES = 32


class RoleName(StrEnum):
    """Names of protos.auth.access.Role; that module needs gRPC, which is slow to import."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


def token(
    context: typer.Context,
    role: Annotated[RoleName, typer.Option(help="What its owner may do.")] = RoleName.READ,
) -> None:
    """Print a new line for a server's --token-file: the role, and the token for the client."""
    made = secrets.token_urlsafe(_TOKEN_BYTES)
    record = {"role": role.value, "token": made}
    settings_of(context).output.result(record, f"{role.value} {made}")
