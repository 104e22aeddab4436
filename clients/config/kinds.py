"""The job classes by method (`method.type` selects the class of a job), and their JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.sweep import LABEL

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
_SWEEP = {
    "description": "Lists of values for keys of the job; each combination is a job of its own. Or"
    " a list of tables, each with values for keys of a job of its own.",
    "anyOf": [
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {
                "anyOf": [{"type": "array", "minItems": 1}, {"$ref": "#/$defs/Sweep"}],
            },
        },
        {"type": "array", "minItems": 1, "items": {"type": "object", "minProperties": 1}},
    ],
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


def schema_of(kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the JSON Schema of job files for jobs of the given classes.

    A file has one job, or several jobs in `[[job]]` tables. A required key stays required even if
    the table `sweep` has a list for it.
    """
    _, schema = models_json_schema([(kind, "validation") for kind in kinds])
    definitions = schema["$defs"]
    for kind in kinds:
        definitions[kind.__name__]["properties"][LABEL] = {"$ref": "#/$defs/Sweep"}
    job_schemas = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]
    file_schema = {
        "type": "object",
        "required": ["job"],
        "properties": {"job": {"type": "array", "minItems": 1, "items": {"anyOf": job_schemas}}},
        "additionalProperties": False,
    }
    return {"anyOf": [*job_schemas, file_schema], "$defs": {**definitions, "Sweep": _SWEEP}}
