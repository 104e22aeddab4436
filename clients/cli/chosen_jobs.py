"""The options that choose jobs for `distill ls`, `cancel`, `resume`, `rm` and `table`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from clients.jobs.job import JobState
from clients.jobs.selection import jobs_in, seconds_of
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient

AllOption = Annotated[bool, typer.Option("--all", help="All jobs that the command can be for.")]
StateOption = Annotated[
    JobState | None,
    typer.Option(case_sensitive=False, help="All jobs in this state.", show_choices=True),
]
OlderThanOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Only jobs that ended (or, if they have not, were submitted) at least this long ago,"
        " such as 30d, 12h or 90m.",
    ),
]
MineOption = Annotated[bool, typer.Option("--mine", help="Only jobs of the owner of your token.")]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="Only jobs with this label. Repeatable."),
]


@dataclass(frozen=True)
class Choice:
    """Jobs by their names, or by the options; an empty choice is refused."""

    names: Sequence[str] | None = None
    every: bool = False
    state: JobState | None = None
    older_than: str | None = None
    mine: bool = False
    labels: Sequence[str] | None = None

    @property
    def _has_options(self) -> bool:
        return bool(self.every or self.state or self.older_than or self.mine or self.labels)

    def ids(self, client: DistillClient, states: Collection[JobState]) -> Sequence[str]:
        """Return the names, or the ids of the jobs that the options describe, the oldest first.

        `states`: those that the command is for. Raises InvalidInput if nothing is given, or both
        names and options.
        """
        options = "--all, --mine, --label, --state and --older-than"
        if self.names:
            if self._has_options:
                hint = f"give either jobs, or {options}"
                raise InvalidInput("cannot be combined with options", field="JOB", hint=hint)
            return self.names
        if not self._has_options:
            raise InvalidInput("missing", field="JOB", hint=f"give jobs, or {options}")
        if self.state is not None and self.state not in states:
            among = ", ".join(sorted(states))
            raise InvalidInput(f"got {self.state}, expected one of {among}", field="--state")
        found = jobs_in(
            client,
            {self.state} if self.state else states,
            older_than_seconds=0.0 if self.older_than is None else seconds_of(self.older_than),
            mine=self.mine,
            labels=parse_labels(self.labels),
        )
        return [job.id for job in found]


def parse_labels(given: Sequence[str] | None) -> Mapping[str, str]:
    """Parse the NAME=VALUE texts of the option --label; raises InvalidInput."""
    found = {}
    for one in given or ():
        name, _, text = one.partition("=")
        if not name or not text:
            raise InvalidInput(f"{one!r} is not NAME=VALUE", field="--label")
        found[name] = text
    return found
