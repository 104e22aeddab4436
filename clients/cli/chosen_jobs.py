"""The selection of jobs by job ids or by options such as --state, and the definition of these
options.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.completion import complete_label
from clients.jobs.job import TERMINAL, Job, JobState
from protos.errors import InvalidInput

if TYPE_CHECKING:
    from clients.jobs.client import DistillClient

RESUMABLE = frozenset({JobState.FAILED, JobState.CANCELLED})
CANCELLABLE = frozenset(JobState) - TERMINAL - {JobState.CANCELLING}
MAX_JOBS = 1_000_000
_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_TIME = re.compile(r"(\d{1,6})([mhd])")


def jobs_in(
    client: DistillClient,
    states: Collection[JobState],
    *,
    older_than_seconds: float = 0.0,
    own_only: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Sequence[Job]:
    """Return the jobs in one of `states`: first the queued jobs, then all others, each oldest
    first.

    The caller cancels jobs in this order. A queued job then cannot start in the place of a running
    job that was cancelled before it. `older_than_seconds`, `own_only` (`mine` there) and `labels`:
    filters; see DistillClient.list.
    """
    jobs = client.list(
        state=states,
        limit=MAX_JOBS,
        mine=own_only,
        labels=labels,
        older_than_seconds=older_than_seconds,
    )
    return sorted(jobs, key=lambda job: (job.state is not JobState.QUEUED, job.created_at))


def seconds_of(text: str) -> float:
    """Return the duration in `text`, such as `30d`, `12h` or `90m`, in seconds.

    Raises InvalidInput if `text` is no such duration.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"{text!r} is not a time", field="--older-than", hint="write a time such as 30d or 12h"
        )
    return float(int(match[1]) * _SECONDS[match[2]])


AllOption = Annotated[bool, typer.Option("--all", help="All jobs to which the command applies.")]
StateOption = Annotated[
    JobState | None,
    typer.Option(case_sensitive=False, help="All jobs in this state.", show_choices=True),
]
OlderThanOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Only jobs that ended (unfinished jobs: were submitted) at least this long ago,"
        " such as 30d, 12h or 90m.",
    ),
]
MineOption = Annotated[bool, typer.Option("--mine", help="Only jobs of the owner of your token.")]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=VALUE",
        help="Only jobs with this label. Repeatable.",
        autocompletion=complete_label,
    ),
]


@dataclass(frozen=True)
class Choice:
    """The jobs that the user selects: by name (`names`), or by options (all other fields)."""

    names: Sequence[str] | None = None
    every: bool = False
    state: JobState | None = None
    older_than: str | None = None
    own_only: bool = False
    labels: Sequence[str] | None = None

    @property
    def _has_options(self) -> bool:
        return bool(self.every or self.state or self.older_than or self.own_only or self.labels)

    def ids(self, client: DistillClient, states: Collection[JobState]) -> Sequence[str]:
        """Return the given names. Without names, return the ids of the jobs that match the options.

        `states`: job states that the command supports. The ids are in the order of `jobs_in`.
        Raises InvalidInput if the user gave neither names nor options, or both.
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
            expected_states = ", ".join(sorted(states))
            raise InvalidInput(
                f"got {self.state}, expected one of {expected_states}", field="--state"
            )
        jobs = jobs_in(
            client,
            {self.state} if self.state else states,
            older_than_seconds=0.0 if self.older_than is None else seconds_of(self.older_than),
            own_only=self.own_only,
            labels=parse_labels(self.labels),
        )
        return [job.id for job in jobs]


def parse_labels(options: Sequence[str] | None) -> Mapping[str, str]:
    """Return the labels in the values NAME=VALUE of the option --label, as a mapping.

    Raises InvalidInput for a value of another form.
    """
    labels = {}
    for option in options or ():
        name, _, text = option.partition("=")
        if not name or not text:
            raise InvalidInput(f"{option!r} is not NAME=VALUE", field="--label")
        labels[name] = text
    return labels
