"""Pipelines as trees: each job stands below a job that it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clients.jobs.display.tables import COLUMNS, Row, list_row
from clients.jobs.job import Job

TREE_COLUMNS = [
    "job",
    *(name for name in COLUMNS if name in ("state", "steps", "result")),
    "reason",
]


def connected_jobs(jobs: Iterable[Job], job_id: str = "") -> list[Job]:
    """Return the jobs that belong to pipelines, in the order of `jobs`.

    A pipeline is a set of at least two jobs that are connected by dependencies. `job_id`: return
    only the pipeline of this job; a job without a pipeline is returned alone.
    """
    jobs = list(jobs)
    neighbours: dict[str, set[str]] = {job.id: set() for job in jobs}
    for job in jobs:
        for dependency in neighbours.keys() & job.dependencies:
            neighbours[job.id].add(dependency)
            neighbours[dependency].add(job.id)
    if not job_id:
        return [job for job in jobs if neighbours[job.id] or job.dependencies]
    members, pending = {job_id}, [job_id]
    while pending:
        new_members = neighbours[pending.pop()] - members
        members |= new_members
        pending += new_members
    return [job for job in jobs if job.id in members]


def tree_rows(jobs: Sequence[Job], now: float) -> list[Row]:
    """Return a row for each job, with the columns `TREE_COLUMNS`; `now` is in Unix seconds.

    `jobs` are in order of submission. A job with several dependencies stands below the dependency
    that was submitted last, and its row names the other dependencies.
    """
    order = {job.id: number for number, job in enumerate(jobs)}
    children: dict[str, list[Job]] = {}
    for job in jobs:
        parents = sorted(order.keys() & job.dependencies, key=lambda parent: order[parent])
        children.setdefault(parents[-1] if parents else "", []).append(job)
    return [_row_of(*line, now) for line in _iter_lines(children)]


def _iter_lines(children: Mapping[str, Sequence[Job]]) -> Iterator[tuple[Job, str, str]]:
    """Yield (job, branch, id of the parent) for each job, depth first.

    The branch is the text before the id, which draws the lines of the tree. `children`: the jobs
    directly below each job, by its id; the jobs at the top have the key "". There is no recursion,
    because a chain of jobs can be longer than Python's limit.
    """
    # (job, branch, id of the parent, start of the branches below the job)
    pending = [(job, "", "", "") for job in reversed(children.get("", ()))]
    while pending:
        job, branch, parent, indent = pending.pop()
        yield job, branch, parent
        siblings = children.get(job.id, ())
        for child in reversed(siblings):
            is_last = child is siblings[-1]
            branch = indent + ("`- " if is_last else "|- ")
            pending.append((child, branch, job.id, indent + ("   " if is_last else "|  ")))


def _row_of(job: Job, branch: str, parent: str, now: float) -> Row:
    row = list_row(job, now)
    others = ", ".join(name for name in job.dependencies if name != parent)
    dependencies = f"{'also ' if parent else ''}after {others}" if others else ""
    reason = "; ".join(filter(None, (row["reason"], dependencies)))
    return {**row, "job": branch + job.id, "reason": reason}
