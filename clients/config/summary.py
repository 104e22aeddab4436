"""The summary of a job: its models and data, and the keys that differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from clients.config.kinds import AnyJob

# A page shows these keys elsewhere.
_IDENTITY = ("name", "labels", "method.type", "student.model", "teacher.model", "data.path")


@dataclass(frozen=True)
class JobSummary:
    """The models and the data of a job, as in the job file.

    - student: the model; "" for a capture.
    - teacher: the model or the address; "" without a teacher. Several teachers are separated by
      commas.
    - data: the paths of the data sets, joined by " + ".
    - changed_keys: (key, value) of each other key that differs from its default.
    """

    method: str
    student: str
    teacher: str
    data: str
    changed_keys: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """Return `STUDENT <- TEACHER, DATA`, without the parts that the job does not have."""
        models = " <- ".join(filter(None, (self.student, self.teacher)))
        return ", ".join(filter(None, (models, self.data)))


def summary_of(config: AnyJob) -> JobSummary:
    """Return the summary of a valid job."""
    student = config.answering_student
    data = config.data
    paths = [data.path, *(mixed.path for mixed in getattr(data, "mix", ()))] if data else []
    keys = tuple((key, value) for key, value in _changed_keys(config) if key not in _IDENTITY)
    return JobSummary(
        config.method.type,
        "" if student is None else student.model,
        _teacher_of(config),
        " + ".join(paths),
        keys,
    )


def _teacher_of(config: AnyJob) -> str:
    if model := getattr(getattr(config, "teacher", None), "model", None):
        return str(model)
    addresses = [
        f"{name} at {_first_of(address)}" if name else f"teacher at {_first_of(address)}"
        for name, address in config.teacher_addresses.items()
    ]
    return ", ".join(addresses)


def _first_of(address: str | list[str]) -> str:
    return address if isinstance(address, str) else ", ".join(address)


def _changed_keys(
    table: BaseModel, usual_table: BaseModel | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, JSON value) for each key of a table that differs from its usual value.

    The usual values are those of `usual_table`. Without this table, they are the defaults of the
    class.
    """
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        usual = (
            getattr(usual_table, name, PydanticUndefined)
            if usual_table is not None
            else field.get_default(call_default_factory=True)
        )
        if isinstance(value, BaseModel):
            same_table = usual if type(usual) is type(value) else None
            yield from _changed_keys(value, same_table, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}", table.model_dump(mode="json").get(name)
