"""The job classes by method: `method.type` selects the class of a job."""

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

AnyTraining: TypeAlias = OnPolicyJob | OfflineJob | RLJob | SFTJob
AnyJob: TypeAlias = AnyTraining | CaptureJob | EvalJob
Kind: TypeAlias = type[AnyJob]
KINDS: Mapping[str, Kind] = {
    "on_policy": OnPolicyJob,
    "offline": OfflineJob,
    "rl": RLJob,
    "sft": SFTJob,
    "capture": CaptureJob,
    "eval": EvalJob,
}


def kind_of(values: Any) -> Kind:
    """Return the class of an unvalidated job, or OnPolicyJob if `method.type` is unknown."""
    method = values.get("method") if isinstance(values, dict) else None
    name = method.get("type") if isinstance(method, dict) else None
    return KINDS.get(str(name), OnPolicyJob)


def parse_job(document: str | bytes, *, strict: bool = False) -> AnyJob:
    """Parse a job from JSON. Raises pydantic.ValidationError if it is invalid.

    `strict` turns off type conversions, such as from true to 1.
    """
    try:
        values = from_json(document)
    except ValueError:
        values = None  # not JSON; the model raises the error
    return kind_of(values).model_validate_json(document, strict=strict)
