"""What clients send as a job is checked again: they may be of another version, or not ours."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from clients.config import JobConfig
from protos.errors import InvalidInput


def parse_config(config_json: str) -> JobConfig:
    """The job; raises InvalidInput that names the first field at fault and tells of the others."""
    try:
        return JobConfig.model_validate_json(config_json)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        others = [f"{_path(problem)}: {problem['msg']}" for problem in problems[1:]]
        message = "; ".join([problems[0]["msg"], *others])
        raise InvalidInput(message, field=_path(problems[0])) from error


def _path(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "config_json"
