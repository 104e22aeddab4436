"""The settings of a command from the global options, and arguments that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.completion import complete_job, complete_key
from clients.cli.output import Output
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient

DEFAULT_SERVER = "localhost:50051"

JobFileArgument = Annotated[str, typer.Argument(metavar="JOB.toml", help="Job file, TOML or YAML.")]
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job id, an unambiguous prefix of it, or @last for the newest job.",
        autocompletion=complete_job,
    ),
]
JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB...",
        help="Job ids, unambiguous prefixes of ids, or @last.",
        autocompletion=complete_job,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the job file. Repeatable.",
        autocompletion=complete_key,
    ),
]
NameOption = Annotated[
    str, typer.Option("--name", help="Name of the job; overrides `name` of the job file.")
]


@dataclass(frozen=True)
class ClientSettings:
    """The values of the global options: the output, and the address of the job server."""

    output: Output
    server: str = DEFAULT_SERVER

    def client(self) -> DistillClient:
        """Return a client of the job server. The caller closes the client after use."""
        # Importing gRPC takes 0.2 s: only the commands that need it do so.
        from clients.jobs.client import DistillClient

        self.output.detail(f"server: {self.server}")
        try:
            return DistillClient(self.server)
        except InvalidInput as error:
            error.field = error.field or "--server"
            raise


def settings_of(context: typer.Context) -> ClientSettings:
    """Return the ClientSettings that the callback of the app stored in the context."""
    settings = context.find_object(ClientSettings)
    assert settings is not None, "global_options sets the object"
    return settings


def overrides(sets: list[str] | None, name: str) -> list[str]:
    """Return all overrides of the job file as KEY=VALUE strings, including --name."""
    return [*(sets or []), *([f"name={name}"] if name else [])]
