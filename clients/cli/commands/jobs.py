"""`distill ls`, `table`, `tree`, `show`, `cancel`, `resume`, `rm` and `pin`, with a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.chosen_jobs import (
    CANCELLABLE,
    MAX_JOBS,
    RESUMABLE,
    AllOption,
    Choice,
    LabelOption,
    MineOption,
    OlderThanOption,
    StateOption,
    parse_labels,
)
from clients.cli.completion import complete_job, complete_metric
from clients.cli.output import Output
from clients.cli.settings import JobArgument, JobsArgument, settings_of
from clients.jobs.job import TERMINAL, Job, JobState, facts_of
from clients.jobs.view import describe_state
from protos.errors import (
    DistillError,
    Forbidden,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from protos.program.logs import plain

if TYPE_CHECKING:
    from clients.jobs.results import Result


def ls(
    context: typer.Context,
    state: Annotated[
        JobState | None,
        typer.Option(case_sensitive=False, help="Show only jobs in this state.", show_choices=True),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many jobs.")] = 50,
    own_only: MineOption = False,
    owner: Annotated[str, typer.Option(metavar="NAME", help="Show only jobs of this owner.")] = "",
    labels: LabelOption = None,
) -> None:
    """List jobs, newest first."""
    from clients.jobs.display.tables import list_columns, list_row

    settings = settings_of(context)
    wanted_labels = parse_labels(labels)
    with settings.client() as client:
        jobs = client.list(
            state=state, limit=limit, mine=own_only, owner=owner, labels=wanted_labels
        )
    if not jobs and not settings.output.as_json:
        settings.output.say("no jobs")
        return
    if settings.output.as_json:
        settings.output.table("jobs", [*map(facts_of, jobs)], ())
        return
    now = time.time()
    settings.output.table("jobs", [list_row(job, now) for job in jobs], list_columns(jobs))


def table(
    context: typer.Context,
    jobs: JobsArgument = None,
    every: AllOption = False,
    state: StateOption = None,
    older_than: OlderThanOption = None,
    own_only: MineOption = False,
    labels: LabelOption = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            "-m",
            metavar="METRIC",
            help="Show this metric; by default the metric that selects the best checkpoint.",
            autocompletion=complete_metric,
        ),
    ] = "",
) -> None:
    """Compare jobs, such as those of a sweep: labels that differ, state, last and best result.

    An asterisk marks the best of all results.
    """
    from clients.jobs.display.tables import compare_records

    settings = settings_of(context)
    choice = Choice(jobs, every, state, older_than, own_only, labels)
    with settings.client() as client:
        selected_jobs = [client.get(job) for job in choice.ids(client, frozenset(JobState))]
        comparison = compare_records([job.record() for job in selected_jobs], metric)
    if settings.output.as_json:
        results = comparison.results
        facts = [{**facts_of(result.job), **_measured_facts(result)} for result in results]
        settings.output.result({"metric": comparison.metric, "jobs": facts}, "")
    elif not selected_jobs:
        settings.output.say("no jobs")
    else:
        settings.output.table("jobs", comparison.rows, comparison.columns)


def tree(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="[JOB]",
            help="Show only the pipeline of this job.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = "",
    own_only: MineOption = False,
    labels: LabelOption = None,
) -> None:
    """Show pipelines as trees: each job with its state, below the job that it waits for."""
    from clients.jobs.display.tree import TREE_COLUMNS, connected_jobs, tree_rows

    settings = settings_of(context)
    with settings.client() as client:
        job_id = client.get(job).id if job else ""
        jobs = client.list(limit=MAX_JOBS, mine=own_only, labels=parse_labels(labels))
    members = connected_jobs(reversed(jobs), job_id)
    if settings.output.as_json:
        settings.output.result({"jobs": [facts_of(member) for member in members]}, "")
    elif not members:
        settings.output.say("no job depends on another")
    else:
        settings.output.table("jobs", tree_rows(members, time.time()), TREE_COLUMNS)


def show(context: typer.Context, job: JobArgument) -> None:
    """Show a job: state, reason, steps, times, checkpoints and newest metrics."""
    settings = settings_of(context)
    with settings.client() as client:
        job_record = client.get(job)
    settings.output.result(facts_of(job_record), _describe_job(job_record))


def cancel(
    context: typer.Context,
    jobs: JobsArgument = None,
    every: AllOption = False,
    state: StateOption = None,
    older_than: OlderThanOption = None,
    own_only: MineOption = False,
    labels: LabelOption = None,
    now: Annotated[bool, typer.Option("--now", help="Do not write a last checkpoint.")] = False,
) -> None:
    """Stop jobs after a checkpoint. It is safe to repeat.

    The trainer finishes its step and writes the checkpoint. If the trainer still runs after 60 s
    plus twice the duration of its last step, the server kills the trainer, and the newest earlier
    checkpoint remains.
    """
    settings = settings_of(context)
    choice = Choice(jobs, every, state, older_than, own_only, labels)
    with settings.client() as client:
        # A job that stops after a last checkpoint can be told to stop at once.
        states = CANCELLABLE | {JobState.CANCELLING} if now else CANCELLABLE
        job_ids = choice.ids(client, states)
        _apply_to_jobs(
            settings.output,
            job_ids,
            lambda job: client.cancel(job, now=now),
            lambda job: f"{job.id} {job.state}",
            stop_on_error=bool(jobs),
        )


def resume(
    context: typer.Context,
    jobs: JobsArgument = None,
    every: AllOption = False,
    state: StateOption = None,
    older_than: OlderThanOption = None,
    own_only: MineOption = False,
    labels: LabelOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="max_steps=N", help="Train to step N. No other key can change."
        ),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="STEP",
            min=1,
            help="Resume from the checkpoint of this step, by default from the newest.",
        ),
    ] = None,
) -> None:
    """Resume jobs from a checkpoint, as new attempts."""
    settings = settings_of(context)
    choice = Choice(jobs, every, state, older_than, own_only, labels)
    max_steps = max_steps_of(sets or [])
    with settings.client() as client:
        job_ids = choice.ids(client, RESUMABLE)
        _apply_to_jobs(
            settings.output,
            job_ids,
            lambda job: client.resume(job, max_steps=max_steps, from_step=from_step),
            lambda job: f"{job.id} {job.state} attempt {job.attempt}",
            stop_on_error=bool(jobs),
        )


def rm(
    context: typer.Context,
    jobs: JobsArgument = None,
    every: AllOption = False,
    state: StateOption = None,
    older_than: OlderThanOption = None,
    own_only: MineOption = False,
    labels: LabelOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove jobs that have ended, with their files on the server.

    The command refuses pinned jobs, and jobs whose outputs an unfinished job needs.
    """
    settings = settings_of(context)
    choice = Choice(jobs, every, state, older_than, own_only, labels)
    with settings.client() as client:
        job_ids = choice.ids(client, TERMINAL)
        if job_ids and not yes:
            _confirm_removal(settings.output, [client.get(job) for job in job_ids])
        _apply_to_jobs(
            settings.output,
            job_ids,
            client.remove,
            lambda job: f"{job.id} removed",
            stop_on_error=bool(jobs),
        )


def pin(
    context: typer.Context,
    jobs: JobsArgument,
    off: Annotated[
        bool, typer.Option("--off", help="Allow the removal of the jobs again.")
    ] = False,
) -> None:
    """Protect jobs from removal by `distill rm` and by the server's --keep-days."""
    settings = settings_of(context)
    with settings.client() as client:
        _apply_to_jobs(
            settings.output,
            jobs or [],
            lambda job: client.pin(job, pinned=not off),
            lambda job: f"{job.id} {'pinned' if job.pinned else 'not pinned'}",
            stop_on_error=True,
        )


def _confirm_removal(output: Output, jobs: Sequence[Job]) -> None:
    """Ask the user on the terminal whether to remove the jobs. Raises InvalidInput without a
    terminal.
    """
    description = jobs[0].id if len(jobs) == 1 else f"{len(jobs)} jobs"
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"permanently removes {description}", field="--yes", hint="pass --yes to confirm"
        )
    for job in jobs if len(jobs) > 1 else ():
        output.say(f"{job.id} {job.state}")
    typer.confirm(f"Remove {description} with all files?", abort=True, err=True)


def _apply_to_jobs(
    output: Output,
    jobs: Sequence[str],
    act: Callable[[str], Job],
    line_of: Callable[[Job], str],
    *,
    stop_on_error: bool,
) -> None:
    """Call `act` for each job id in `jobs`, and print the results.

    - `act`: changes one job on the server, and returns the changed job
    - `line_of`: returns the line to print for a changed job
    - `stop_on_error`: True skips the jobs after the first error; used if the user named the jobs

    With `stop_on_error` False, only an error that every further job would also get stops the loop:
    an unreachable server, or a refused token. All errors but the first are printed. Raises the
    first error at the end.
    """
    changed_jobs: list[Job] = []
    faults: list[DistillError] = []
    for job in jobs:
        try:
            changed_jobs.append(act(job))
        except DistillError as error:
            faults.append(error)
            if stop_on_error or isinstance(error, Unavailable | Forbidden | Unauthenticated):
                break
    if changed_jobs or (output.as_json and not faults):
        print_jobs(output, changed_jobs, [line_of(job) for job in changed_jobs])
    elif not faults:
        output.say("no jobs")
    for fault in faults[1:]:
        output.say(f"error: {fault}")
    if faults and len(jobs) > 1:
        skipped = len(jobs) - len(changed_jobs) - len(faults)
        skipped_part = f", {skipped} not tried" if skipped else ""
        output.say(f"{len(changed_jobs)} of {len(jobs)} jobs changed{skipped_part}")
    if faults:
        raise faults[0]


def max_steps_of(sets: list[str]) -> int | None:
    """Return N of the option --set max_steps=N, or None without this option.

    Raises InvalidInput for any other key: a resumed job continues from checkpoints that were made
    with the old values.
    """
    from clients.config.file import parse_override

    max_steps: int | None = None
    for override in sets:
        path, value = parse_override(override)
        if path != ("max_steps",):
            raise InvalidInput(
                "a resumed job can only change max_steps",
                field=f"--set {'.'.join(path)}",
                hint="submit a new job to change other keys",
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            message = f"must be a whole number of at least 1 (got {value!r})"
            raise InvalidInput(message, field="max_steps")
        max_steps = value
    return max_steps


def print_jobs(output: Output, jobs: Sequence[Job], lines: Sequence[str]) -> None:
    """Print the jobs: `lines`, or with --json one object.

    With --json, the object is the job if there is one job. Otherwise it has the jobs in a list
    under the key `jobs`.
    """
    facts = [facts_of(job) for job in jobs]
    output.result(facts[0] if len(facts) == 1 else {"jobs": facts}, "\n".join(lines))


def _measured_facts(result: Result) -> Mapping[str, Any]:
    last, best = result.last, result.best
    return {"last": last and asdict(last), "best": best and asdict(best)}


def _describe_job(job: Job) -> str:
    lines = [
        ("id", job.id),
        ("name", plain(job.name)),
        ("owner", plain(job.owner)),
        ("labels", plain(", ".join(f"{name}={text}" for name, text in job.labels.items()))),
        ("state", plain(describe_state(job.state, job.phase))),
        ("reason", plain(job.reason)),
        ("steps", f"{job.step}/{job.max_steps}, attempt {job.attempt}"),
        ("created", _format_time(job.created_at)),
        ("started", _format_time(job.started_at)),
        ("ended", _format_time(job.ended_at)),
        ("checkpoints", ", ".join(map(str, job.checkpoints))),
        *((name, f"{value:.6g}") for name, value in sorted(job.metrics.items())),
    ]
    return "\n".join(f"{name:<20} {value}" for name, value in lines if value)


def _format_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""
