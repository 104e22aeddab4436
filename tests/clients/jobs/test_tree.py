"""Pipelines as trees."""

from __future__ import annotations

import sys
from typing import Any

from clients.jobs.display.tree import connected_jobs, tree_rows
from clients.jobs.job import Job, JobState


def make_job(job_id: str, *dependencies: str, **changes: Any) -> Job:
    values: dict[str, Any] = {
        **{"name": job_id, "kind": "sft", "state": JobState.QUEUED, "reason": "", "phase": ""},
        **{"attempt": 1, "step": 0, "max_steps": 9, "last_seq": 1, "dependencies": dependencies},
        **{"created_at": 1.0, "started_at": 0.0, "ended_at": 0.0},
    }
    return Job(id=job_id, **{**values, **changes})


ROWS = [
    make_job("rows"),
    make_job("left", "rows"),
    make_job("alone"),
    make_job("right", "rows", reason="no disk"),
    make_job("join", "left", "right"),
    make_job("deep", "left"),
    make_job("late", "gone"),
]


def test_each_job_is_below_its_last_dependency() -> None:
    members = connected_jobs(ROWS)
    assert [job.id for job in members] == ["rows", "left", "right", "join", "deep", "late"]
    rows = tree_rows(members, now=1.0)
    assert [(row["job"], row["reason"]) for row in rows] == [
        ("rows", ""),
        ("|- left", ""),
        ("|  `- deep", ""),
        ("`- right", "no disk"),
        ("   `- join", "also after left"),
        ("late", "after gone"),
    ]


def test_the_pipeline_of_one_job() -> None:
    assert [job.id for job in connected_jobs(ROWS, "deep")] == [
        *("rows", "left", "right", "join", "deep")
    ]
    assert [job.id for job in connected_jobs(ROWS, "alone")] == ["alone"]


def test_a_chain_longer_than_the_limit_of_recursion() -> None:
    count = sys.getrecursionlimit() + 100
    chain = [make_job(f"job-{n}", *([f"job-{n - 1}"] if n else [])) for n in range(count)]
    rows = tree_rows(connected_jobs(chain), now=1.0)
    assert [row["job"].lstrip(" `-") for row in rows] == [job.id for job in chain]
