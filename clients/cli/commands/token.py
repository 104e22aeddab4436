"""`distill token`: generate a token for the token file of a server."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Annotated

import typer

from clients.cli.settings import settings_of
from protos.errors import InvalidInput

_TOKEN_BYTES = 32


class RoleName(StrEnum):
    """The names of `protos.auth.access.Role`.

    They are repeated here, because importing that module imports gRPC, which is slow.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


def token(
    context: typer.Context,
    role: Annotated[RoleName, typer.Option(help="Role of the token.")] = RoleName.READ,
    owner: Annotated[
        str, typer.Option(metavar="NAME", help="Owner of the token and of its jobs.")
    ] = "",
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of running jobs of the owner; further jobs wait."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of GPUs of these jobs together.")
    ] = None,
) -> None:
    """Generate a token and print its line for a server's --token-file: ROLE TOKEN [owner=NAME]."""
    from protos.auth.owners import read_terms

    secret = secrets.token_urlsafe(_TOKEN_BYTES)
    options = {"owner": owner or None, "jobs": jobs, "gpus": gpus}
    terms = {key: value for key, value in options.items() if value is not None}
    words = [f"{key}={value}" for key, value in terms.items()]
    if terms and not owner:
        raise InvalidInput("missing", field="--owner", hint="a quota needs an owner")
    try:
        read_terms(words, "the line")
    except InvalidInput as error:  # only the name can be invalid
        raise InvalidInput(
            f"{owner!r} is not a valid name", field="--owner", hint=error.hint
        ) from error
    line = " ".join([role.value, secret, *words])
    settings_of(context).output.result({"role": role.value, "token": secret, **terms}, line)
