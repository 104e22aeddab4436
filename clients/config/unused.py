"""Refuses keys without effect, and keys that are incompatible with other keys of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Job = TypeVar("Job", bound=BaseModel)
# Whether the job uses the keys, the keys separated by spaces, and the hint of the error.
Rule = tuple[bool, str, str]


def refuse_unused(job: Job, rules: Iterable[Rule]) -> Job:
    """Return `job`. Raises ValidationError with an error at each key that is set but not used.

    A key counts as set if its value is not its default: a resolved job contains every key, so an
    explicit default cannot be distinguished from an implicit default.
    """
    errors: list[InitErrorDetails] = []
    for is_used, keys, remedy in rules:
        for key in () if is_used else keys.split():
            path = tuple(key.split("."))
            value, default = _value_and_default(job, path)
            if value != default:
                problem = PydanticCustomError("unused_key", f"has no effect: {remedy}")
                errors.append(InitErrorDetails(type=problem, loc=path, input=value))
    if errors:
        raise ValidationError.from_exception_data(type(job).__name__, errors)
    return job


def refusal(job: BaseModel, key: str, problem: str) -> ValidationError:
    """Return an error at a key of `job`; dots separate the parts of the key."""
    path = tuple(key.split("."))
    value, _ = _value_and_default(job, path)
    refused_error = PydanticCustomError("refused_key", problem)
    details = InitErrorDetails(type=refused_error, loc=path, input=value)
    return ValidationError.from_exception_data(type(job).__name__, [details])


def _value_and_default(job: BaseModel, path: tuple[str, ...]) -> tuple[object, object]:
    """Return the value of a key and its default; (None, None) if its table is missing."""
    *tables, name = path
    table: BaseModel | None = job
    for inner in tables:
        table = getattr(table, inner, None)
    if table is None or name not in type(table).model_fields:
        return None, None
    field = type(table).model_fields[name]
    return getattr(table, name), field.get_default(call_default_factory=True)
