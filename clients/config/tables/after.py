"""The key `after` of every job, and values such as `@JOB/store`, the output of another job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, WithJsonSchema

from clients.config.tables.common import refusal


def _parse_names(value: Any) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(
        isinstance(name, str) and name for name in listed
    ):
        raise ValueError("must be the name or the id of a job, or a list of them")
    return tuple(dict.fromkeys(listed))


_TEXT = {"type": "string", "minLength": 1}
After = Annotated[
    tuple[str, ...],
    BeforeValidator(_parse_names),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]

# Keys that may name a file or directory, and so may name the output of a job.
_FILE_KEYS: tuple[tuple[str, ...], ...] = (
    ("student", "model"),
    ("student", "chat_template"),
    ("data", "path"),
    ("data", "eval_path"),
    ("data", "eval_prompts"),
    ("data", "prompts"),
    ("data", "tokenizer"),
    ("data", "image_folder"),
    ("teacher", "model"),
    ("teacher", "tokenizer"),
    ("reward", "file"),
    ("environment", "retriever"),
)
_OUTPUT = re.compile(r"@(.+)/(store|export)", re.DOTALL)


@dataclass(frozen=True)
class JobOutput:
    """A reference to the output of another job: a key of this job has the value `@JOB/KIND`.

    - key: the key of this job.
    - job: the name or id of the other job.
    - kind: "store" for the rows of a capture, "export" for the model of a training job.
    """

    key: str
    job: str
    kind: str

    def __str__(self) -> str:
        return f"@{self.job}/{self.kind}"


def is_output(value: str) -> bool:
    """Return True if a value names the output of a job instead of a file."""
    return value.startswith("@")


def parse_output(value: str) -> tuple[str, str] | None:
    """Return (job, kind) of the output that a value names; None if the value names a file."""
    match = _OUTPUT.fullmatch(value)
    return None if match is None else (match[1], match[2])


def output_of(method: str) -> str:
    """Return the kind of output that other jobs can read from a job of this method; "" for none."""
    return {"capture": "store", "eval": ""}.get(method, "export")


def outputs_in(job: BaseModel) -> list[JobOutput]:
    """Return the outputs of other jobs that a valid job reads."""
    matches = ((key, _OUTPUT.fullmatch(value)) for key, value in _output_values(job))
    return [JobOutput(key, match[1], match[2]) for key, match in matches if match]


def check_outputs(job: BaseModel) -> None:
    """Raise ValidationError if a value that begins with "@" is invalid for its key.

    Such a value must name an output, of the kind that its key accepts.
    """
    for key, value in _output_values(job):
        kind = _kind_of(job, key)
        if not kind:
            problem = f"cannot be the output of a job ({value!r}); give a file"
            raise refusal(job, key, problem)
        match = _OUTPUT.fullmatch(value)
        if not match or match[2] != kind:
            raise refusal(job, key, f"got {value!r}, expected '@JOB/{kind}', the {kind} of a job")


def _kind_of(job: Any, key: str) -> str:
    """Return the kind of output that the key accepts, or ""."""
    if key in ("student.model", "teacher.model"):
        return "export"
    return "store" if key in job.stores else ""


def named_values(job: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each key that may name a file, a directory or an output."""
    for table, name in _FILE_KEYS:
        value = getattr(getattr(job, table, None), name, None)
        if isinstance(value, str):
            yield f"{table}.{name}", value
    for number, mixed in enumerate(getattr(getattr(job, "data", None), "mix", ())):
        yield f"data.mix.{number}.path", mixed.path


def _output_values(job: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in named_values(job) if is_output(value)]
