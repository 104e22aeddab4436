"""Validates submitted jobs again, because the client may have another version."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from clients.config.kinds import AnyJob, parse_job
from protos.errors import InvalidInput


def parse_config(config_json: str) -> AnyJob:
    """Parse and validate a job.

    Raises InvalidInput if the job is not valid (`field` is the first wrong field; the message lists
    all problems), if a capture names its own store, or if a reward names a Python file.
    """
    try:
        job = parse_job(config_json)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        other_problems = [f"{_format_path(problem)}: {problem['msg']}" for problem in problems[1:]]
        message = "; ".join([problems[0]["msg"], *other_problems])
        raise InvalidInput(message, field=_format_path(problems[0])) from error
    if job.output_store is not None:
        # On a server, a job may write only to its run directory.
        raise InvalidInput(
            "a server stores the rows in the run directory",
            field="method.store",
            hint="remove the key; distill pull downloads the rows",
        )
    if job.reward_table is not None and job.reward_table.file is not None:
        raise InvalidInput(
            "a server does not run the code of a job",
            field="reward.file",
            hint="use distill run, which runs the job on your own machine",
        )
    return job


def digest_of(config: AnyJob) -> str:
    """Return a digest of the keys whose values differ from the defaults.

    Default values are left out, so that new keys of a later version do not change old digests.
    """
    return sha256(config.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def is_same_job(config_json: str, config: AnyJob) -> bool:
    """Return True if the stored JSON parses to this job.

    This comparison is needed for digests of older servers, which covered every key: new keys in a
    later version change such a digest.
    """
    try:
        return parse_job(config_json) == config
    except ValidationError:
        return False


def _format_path(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"]) or "config_json"
