"""The JSON Schema of job files, for editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from clients.config.kinds import Kind
from clients.config.sweep import LABEL

_SWEEP = {
    "type": "object",
    "description": "Lists of values for keys of the job; each combination is a job of its own.",
    "minProperties": 1,
    "additionalProperties": {
        "anyOf": [{"type": "array", "minItems": 1}, {"$ref": "#/$defs/Sweep"}],
    },
}


def schema_of(kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the schema of files with one job of these kinds, or with several in `[[job]]` tables.

    A required key stays required even if the table `sweep` has a list for it.
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
