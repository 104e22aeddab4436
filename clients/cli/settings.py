"""What the global options say, handed to every command; and the arguments that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.completion import complete_job
from clients.cli.output import Output

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient

DEFAULT_SERVER = "localhost:50051"

JobFileArgument = Annotated[str, typer.Argument(metavar="JOB.toml", help="Job file, TOML or YAML.")]
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Id, unambiguous start of one, or @last.",
        autocompletion=complete_job,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key; may be repeated."),
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the job, as in the file.")]


@dataclass(frozen=True)
class Settings:
    output: Output
    server: str = DEFAULT_SERVER

    def client(self) -> DistillClient:
        # gRPC costs 0.2 s to import: only the commands that need it pay.
        from clients.jobs.client import DistillClient

        self.output.detail(f"server: {self.server}")
        return DistillClient(self.server)


def settings_of(context: typer.Context) -> Settings:
    found = context.find_object(Settings)
    assert found is not None, "the app's callback makes it"
    return found


def overrides(sets: list[str] | None, name: str) -> list[str]:
    return [*(sets or []), *([f"name={name}"] if name else [])]
