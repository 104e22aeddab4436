"""The public Python interface: jobs, teachers, stored rows and job files.

    from clients import DistillClient, LogitStore, TeacherClient, load_job

The names in `__all__` are the public interface. The first use of a name imports its module, so
`import clients` itself imports neither torch nor gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import protos  # noqa: F401  # before any of its users imports gRPC

if TYPE_CHECKING:
    from clients.config.capture import (
        CaptureConfig,
        CaptureData,
        CaptureJob,
        CaptureTeacher,
        RayConfig,
    )
    from clients.config.evaluation import EvalJob, EvalMethod
    from clients.config.file import JobFile, JobSource, load_job, load_jobs, sweep_job
    from clients.config.kinds import AnyJob
    from clients.config.offline import OfflineConfig, OfflineData, OfflineJob
    from clients.config.on_policy import OnPolicyConfig, OnPolicyJob, OnPolicyTeacher
    from clients.config.rl import RLJob, RLTeacher
    from clients.config.sft import SFTConfig, SFTJob
    from clients.config.tables.common import (
        CheckpointConfig,
        EvalConfig,
        EvaluatedModel,
        ExportConfig,
        LoraConfig,
        ResourcesConfig,
        SampledEvalConfig,
        StudentConfig,
        TrackConfig,
        TrackerConfig,
        TrainConfig,
    )
    from clients.config.tables.data import DataConfig, MixConfig
    from clients.config.tables.environment import SearchConfig
    from clients.config.tables.reward import LengthPenalty, RewardConfig
    from clients.config.tables.rl_method import AnchorConfig, RLConfig
    from clients.config.tables.rollouts import RolloutsConfig
    from clients.config.tables.teacher import TeacherLink
    from clients.jobs.aio import AsyncDistillClient
    from clients.jobs.artifacts import pull_run
    from clients.jobs.client import DistillClient, JobHandle
    from clients.jobs.display.job_display import AnswerSamples, JobList, MetricCurve, compare
    from clients.jobs.display.tables import Comparison
    from clients.jobs.job import Job, JobEvent, JobState
    from clients.jobs.record import JobRecord, points_of, record_of_run
    from clients.local.preview import preview
    from clients.local.run import RunHandle, run
    from clients.runs.directory import RunDirectory
    from clients.store.dataset import LogitDataset
    from clients.store.store import LogitStore
    from clients.teacher.aio import AsyncTeacherClient
    from clients.teacher.client import TeacherClient
    from clients.teacher.info import TeacherInfo
    from clients.teacher.query import ScoreQuery
    from protos.errors import DistillError
    from protos.rows.codec import RowBlock

# Names of each module, separated by spaces.
_NAMES = {
    "clients.config.capture": "CaptureConfig CaptureData CaptureJob CaptureTeacher RayConfig",
    "clients.config.evaluation": "EvalJob EvalMethod",
    "clients.config.file": "JobFile JobSource load_job load_jobs sweep_job",
    "clients.config.kinds": "AnyJob",
    "clients.config.offline": "OfflineConfig OfflineData OfflineJob",
    "clients.config.on_policy": "OnPolicyConfig OnPolicyJob OnPolicyTeacher",
    "clients.config.rl": "RLJob RLTeacher",
    "clients.config.sft": "SFTConfig SFTJob",
    "clients.config.tables.common": (
        "CheckpointConfig EvalConfig EvaluatedModel ExportConfig LoraConfig"
        " ResourcesConfig SampledEvalConfig StudentConfig TrackConfig TrackerConfig TrainConfig"
    ),
    "clients.config.tables.data": "DataConfig MixConfig",
    "clients.config.tables.environment": "SearchConfig",
    "clients.config.tables.reward": "LengthPenalty RewardConfig",
    "clients.config.tables.rl_method": "AnchorConfig RLConfig",
    "clients.config.tables.rollouts": "RolloutsConfig",
    "clients.config.tables.teacher": "TeacherLink",
    "clients.jobs.aio": "AsyncDistillClient",
    "clients.jobs.artifacts": "pull_run",
    "clients.jobs.client": "DistillClient JobHandle",
    "clients.jobs.display.job_display": "AnswerSamples JobList MetricCurve compare",
    "clients.jobs.job": "Job JobEvent JobState",
    "clients.jobs.record": "JobRecord points_of record_of_run",
    "clients.jobs.display.tables": "Comparison",
    "clients.local.preview": "preview",
    "clients.local.run": "RunHandle run",
    "clients.runs.directory": "RunDirectory",
    "clients.store.dataset": "LogitDataset",
    "clients.store.store": "LogitStore",
    "clients.teacher.aio": "AsyncTeacherClient",
    "clients.teacher.client": "TeacherClient",
    "clients.teacher.info": "TeacherInfo",
    "clients.teacher.query": "ScoreQuery",
    "protos.errors": "DistillError",
    "protos.rows.codec": "RowBlock",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AnchorConfig",
    "AnswerSamples",
    "AnyJob",
    "AsyncDistillClient",
    "AsyncTeacherClient",
    "CaptureConfig",
    "CaptureData",
    "CaptureJob",
    "CaptureTeacher",
    "CheckpointConfig",
    "Comparison",
    "DataConfig",
    "DistillClient",
    "DistillError",
    "EvalConfig",
    "EvalJob",
    "EvalMethod",
    "EvaluatedModel",
    "ExportConfig",
    "Job",
    "JobEvent",
    "JobFile",
    "JobHandle",
    "JobList",
    "JobRecord",
    "JobSource",
    "JobState",
    "LengthPenalty",
    "LogitDataset",
    "LogitStore",
    "LoraConfig",
    "MetricCurve",
    "MixConfig",
    "OfflineConfig",
    "OfflineData",
    "OfflineJob",
    "OnPolicyConfig",
    "OnPolicyJob",
    "OnPolicyTeacher",
    "RLConfig",
    "RLJob",
    "RLTeacher",
    "RayConfig",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutsConfig",
    "RowBlock",
    "RunDirectory",
    "RunHandle",
    "SFTConfig",
    "SFTJob",
    "SampledEvalConfig",
    "ScoreQuery",
    "SearchConfig",
    "StudentConfig",
    "TeacherClient",
    "TeacherInfo",
    "TeacherLink",
    "TrackConfig",
    "TrackerConfig",
    "TrainConfig",
    "compare",
    "load_job",
    "load_jobs",
    "points_of",
    "preview",
    "pull_run",
    "record_of_run",
    "run",
    "sweep_job",
]


def __getattr__(name: str) -> Any:
    """Return the value of a public name. The first use of the name imports its module (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of this module and all public names.

    The completion of an editor or a notebook therefore shows the public names before their import.
    """
    return sorted({*globals(), *__all__})
