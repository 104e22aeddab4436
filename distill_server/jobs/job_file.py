"""What clients send as a job is checked again: they may be of another version, or not ours."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from clients.config.capture import CaptureJob
from clients.config.kinds import AnyJob, parse_job
from clients.config.rl import RLJob
from protos.errors import InvalidInput


def parse_config(config_json: str) -> AnyJob:
    """The job; raises InvalidInput that names the first field at fault and tells of the others."""
    try:
        job = parse_job(config_json)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        others = [f"{_path(problem)}: {problem['msg']}" for problem in problems[1:]]
        message = "; ".join([problems[0]["msg"], *others])
        raise InvalidInput(message, field=_path(problems[0])) from error
    if isinstance(job, CaptureJob) and job.method.store is not None:
        # A job writes into its run directory, and nowhere else.
        raise InvalidInput(
            "a server keeps the rows in the job's own directory",
            field="method.store",
            hint="leave it out; distill pull fetches them",
        )
    if isinstance(job, RLJob) and job.reward is not None and job.reward.file is not None:
        raise InvalidInput(
            "a server runs no code that a job names",
            field="reward.file",
            hint="distill run does, on your own machine",
        )
    return job


def _path(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "config_json"
