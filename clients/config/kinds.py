"""The job models by method: `method.type` selects the model class of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic_core import from_json

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.common import TrainingJob
from clients.config.tables.teacher import TeacherLink

AnyTraining: TypeAlias = OnPolicyJob | OfflineJob | RLJob | SFTJob
AnyJob: TypeAlias = AnyTraining | CaptureJob | EvalJob
# Jobs whose student samples answers to learn from; each has the table `rollouts`.
SamplingJob: TypeAlias = OnPolicyJob | OfflineJob | RLJob
Kind: TypeAlias = (
    type[OnPolicyJob]
    | type[OfflineJob]
    | type[RLJob]
    | type[SFTJob]
    | type[CaptureJob]
    | type[EvalJob]
)
KINDS: Mapping[str, Kind] = {
    "on_policy": OnPolicyJob,
    "offline": OfflineJob,
    "rl": RLJob,
    "sft": SFTJob,
    "capture": CaptureJob,
    "eval": EvalJob,
}


def processes_of(job: AnyJob) -> int:
    """Return the number of processes of the job's program; a capture and an evaluation have one."""
    return job.train.processes if isinstance(job, TrainingJob) else 1


def gpus_of(job: AnyJob) -> int:
    """Return the number of GPUs of the job: one per process, and those of its rollout engines.

    A capture on Ray takes those of its engines from the cluster; any other has one engine.
    """
    if isinstance(job, CaptureJob) and job.method.ray is None:
        return max(1, job.teacher.gpus or 1)
    engines = job.rollouts.gpus if isinstance(job, SamplingJob) else 0
    return processes_of(job) + engines


def started_teacher(job: AnyJob) -> TeacherLink | None:
    """Return the teacher that is started for the job; None if the job needs none.

    A capture loads its model itself.
    """
    if isinstance(job, CaptureJob | EvalJob | SFTJob) or job.teacher is None:
        return None
    return None if job.teacher.model is None else job.teacher


def kind_of(values: Any) -> Kind:
    """Return the model class for an unvalidated job; OnPolicyJob if `method.type` is unknown."""
    method = values.get("method") if isinstance(values, dict) else None
    name = method.get("type") if isinstance(method, dict) else None
    return KINDS.get(name, OnPolicyJob) if isinstance(name, str) else OnPolicyJob


def parse_job(document: str | bytes, *, strict: bool = False) -> AnyJob:
    """Parse a job from JSON. Raises pydantic.ValidationError if it is invalid.

    `strict` turns off type conversions, such as from true to 1.
    """
    try:
        values = from_json(document)
    except ValueError:
        values = None  # not JSON; the model raises the error
    return kind_of(values).model_validate_json(document, strict=strict)
