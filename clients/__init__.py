"""The public Python interface: jobs, teachers, stored rows and job files.

    from clients import DistillClient, LogitStore, TeacherClient, load_job

The names in `__all__` are the public interface. Each is imported from its module on first use, so
`import clients` loads neither torch nor gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import protos  # noqa: F401  # before any of its users imports gRPC

if TYPE_CHECKING:
    from clients.config.capture import CaptureJob
    from clients.config.evaluation import EvalJob
    from clients.config.file import load_job, load_jobs
    from clients.config.offline import OfflineJob
    from clients.config.on_policy import OnPolicyJob
    from clients.config.rl import RLJob
    from clients.config.sft import SFTJob
    from clients.jobs.artifacts import pull_run
    from clients.jobs.client import DistillClient, JobHandle
    from clients.jobs.job import Job, JobEvent, JobState
    from clients.jobs.record import JobRecord, points_of, record_of_run
    from clients.runs.directory import RunDirectory
    from clients.store.dataset import LogitDataset
    from clients.store.store import LogitStore
    from clients.teacher.aio import AsyncTeacherClient
    from clients.teacher.client import TeacherClient
    from clients.teacher.info import TeacherInfo
    from clients.teacher.query import ScoreQuery
    from protos.errors import DistillError
    from protos.rows.codec import RowBlock

_MODULES = {
    "AsyncTeacherClient": "clients.teacher.aio",
    "CaptureJob": "clients.config.capture",
    "DistillClient": "clients.jobs.client",
    "DistillError": "protos.errors",
    "EvalJob": "clients.config.evaluation",
    "Job": "clients.jobs.job",
    "JobEvent": "clients.jobs.job",
    "JobHandle": "clients.jobs.client",
    "JobRecord": "clients.jobs.record",
    "JobState": "clients.jobs.job",
    "LogitDataset": "clients.store.dataset",
    "LogitStore": "clients.store.store",
    "OfflineJob": "clients.config.offline",
    "SFTJob": "clients.config.sft",
    "OnPolicyJob": "clients.config.on_policy",
    "RLJob": "clients.config.rl",
    "RowBlock": "protos.rows.codec",
    "RunDirectory": "clients.runs.directory",
    "ScoreQuery": "clients.teacher.query",
    "TeacherClient": "clients.teacher.client",
    "TeacherInfo": "clients.teacher.info",
    "load_job": "clients.config.file",
    "load_jobs": "clients.config.file",
    "points_of": "clients.jobs.record",
    "pull_run": "clients.jobs.artifacts",
    "record_of_run": "clients.jobs.record",
}

__all__ = [
    "AsyncTeacherClient",
    "CaptureJob",
    "DistillClient",
    "DistillError",
    "EvalJob",
    "Job",
    "JobEvent",
    "JobHandle",
    "JobRecord",
    "JobState",
    "LogitDataset",
    "LogitStore",
    "OfflineJob",
    "OnPolicyJob",
    "RLJob",
    "RowBlock",
    "RunDirectory",
    "SFTJob",
    "ScoreQuery",
    "TeacherClient",
    "TeacherInfo",
    "load_job",
    "load_jobs",
    "points_of",
    "pull_run",
    "record_of_run",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names too, so that completion shows them before they are imported."""
    return sorted({*globals(), *__all__})
