"""The properties of jobs: no keys of a job file, and equal to a count by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from clients.config.kinds import KINDS, AnyJob, parse_job, schema_of
from clients.config.tables.job import JobConfig, TrainingJob

STUDENT, PROMPTS = {"model": "m"}, {"path": "x.jsonl"}
EXACT = {"type": "exact_match"}
TABLES: dict[str, dict[str, Any]] = {
    "on_policy": {"student": STUDENT, "data": PROMPTS},
    "offline": {"student": STUDENT, "data": {"path": "store"}},
    "rl": {"student": STUDENT, "data": PROMPTS, "reward": EXACT},
    "sft": {"student": STUDENT, "data": PROMPTS},
    "capture": {"data": PROMPTS},
    "eval": {"student": STUDENT, "data": PROMPTS, "reward": EXACT},
}


def job_of(kind: str, **tables: dict[str, Any]) -> AnyJob:
    values = {**TABLES[kind], "method": {"type": kind}}
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table}
    return parse_job(json.dumps(values))


def properties_of(kind: type[JobConfig]) -> set[str]:
    members = [member for ancestor in kind.__mro__[:-1] for member in vars(ancestor).items()]
    return {name for name, member in members if isinstance(member, property)}


@pytest.mark.parametrize("method", KINDS)
def test_properties_are_no_keys(method: str) -> None:
    kind, job = KINDS[method], job_of(method)
    asked = properties_of(kind) & {"gpus", "teacher_link", "data_files", "row_request", "stores"}
    assert len(asked) == 5
    keys = set(schema_of([kind])["$defs"][kind.__name__]["properties"])
    assert not keys & properties_of(kind)
    assert not set(job.model_dump()) & (properties_of(kind) | {"program", "samples"})
    with pytest.raises(ValueError, match="gpus"):
        parse_job(json.dumps({**TABLES[method], "method": {"type": method}, "gpus": 3}))


@pytest.mark.parametrize("processes", [1, 3, 4])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("on_policy", {"rollouts_per_prompt": 3}),
        ("rl", {"rollouts_per_prompt": 5, "updates_per_step": 2}),
        ("sft", {}),
        ("offline", {}),
    ],
)
def test_the_sequences_of_a_process(method: str, changes: dict[str, int], processes: int) -> None:
    """The largest share is that of process 0, dealt out one by one, or in groups of one prompt."""
    prompts, answers = 14, changes.get("rollouts_per_prompt", 1)
    job = job_of(
        method,
        method={"type": method, **changes},
        train={"prompts_per_step": prompts, "processes": processes},
    )
    assert isinstance(job, TrainingJob)
    assert job.sequences_per_step == prompts * answers
    assert job.processes == job.gpus == processes
    if method == "rl":
        update = [[group] * answers for group in range(prompts // changes["updates_per_step"])]
        whole_step = [[group] * answers for group in range(prompts)]
        assert job.sequences_per_update == sum(map(len, update[::processes]))
        assert job.answers_per_step == sum(map(len, whole_step[::processes]))
        assert job.max_processes == prompts // changes["updates_per_step"]
        return
    update_size = len(range(0, prompts * answers, processes))
    assert job.sequences_per_update == update_size
    assert job.answers_per_step == (update_size if method == "on_policy" else 0)
    assert job.max_processes == min(prompts * answers, job.eval.prompts)


def test_stored_prompts_that_are_answered() -> None:
    method = {"type": "offline", "on_policy_fraction": 0.3}
    for processes in (1, 2, 3):
        train = {"prompts_per_step": 14, "processes": processes}
        job = job_of("offline", method=method, teacher={"address": "t:1"}, train=train)
        assert isinstance(job, TrainingJob)
        assert job.answers_per_step == math.ceil(0.3 * 14 / processes)


def test_a_job_of_the_version_with_control_variates_is_read_unless_it_used_them() -> None:
    """job.json has every key, also those at their defaults; a job that was running is resumed."""
    job: dict[str, Any] = {
        "student": {"model": "s"},
        "teacher": {"address": "localhost:1"},
        "data": {"path": "d"},
        "max_steps": 1,
        "method": {"type": "on_policy", "control_variate": False},
    }
    assert parse_job(json.dumps(job)).method.type == "on_policy"
    job["method"]["control_variate"] = True
    with pytest.raises(ValidationError, match="control_variate"):
        parse_job(json.dumps(job))
