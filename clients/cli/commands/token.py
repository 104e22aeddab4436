"""`distill token`: generate a token for the token file of a server."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Annotated

import typer

from clients.cli.settings import settings_of

_TOKEN_BYTES = 32


class RoleName(StrEnum):
    """The names of `protos.auth.access.Role`; that module imports gRPC, which is slow."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


def token(
    context: typer.Context,
    role: Annotated[RoleName, typer.Option(help="Role of the token.")] = RoleName.READ,
) -> None:
    """Generate a token and print its line for a server's --token-file: ROLE TOKEN."""
    made = secrets.token_urlsafe(_TOKEN_BYTES)
    record = {"role": role.value, "token": made}
    settings_of(context).output.result(record, f"{role.value} {made}")
