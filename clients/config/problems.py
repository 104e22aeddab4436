"""Converts pydantic's errors about a job into messages with a key, a problem and a suggestion."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from clients.config.kinds import KINDS
from clients.config.lines import KeyPath
from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import Table
from clients.data.object_urls import redact_place
from protos.errors import InvalidInput

# Names of settings in other trainers that resemble no key of this project, with the key.
_KEYS_BY_FOREIGN_NAME: Mapping[str, KeyPath] = {
    "lr": ("train", "learning_rate"),
    "batch_size": ("train", "prompts_per_step"),
    "per_device_train_batch_size": ("train", "prompts_per_step"),
    "micro_batch_size": ("train", "tokens_per_micro_batch"),
    "grad_clip": ("train", "max_grad_norm"),
    "num_train_epochs": ("epochs",),
    "eval_steps": ("eval", "every"),
    "save_steps": ("checkpoint", "every"),
    "max_seq_length": ("method", "max_tokens"),
    "max_length": ("method", "max_tokens"),
    "lora_r": ("student", "lora", "rank"),
    "model_name_or_path": ("student", "model"),
    "dataset": ("data", "path"),
}
# The start of pydantic's messages, such as "String should have at least 1 character".
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|Tuple|Dictionary) should ")


def fields(
    model: type[BaseModel] = OnPolicyJob, table: KeyPath = ()
) -> Mapping[KeyPath, FieldInfo]:
    """Return the fields of `model` and of its inner tables, by the path of their keys.

    Keys that hold a table are left out. `table`: the path in front of every key.
    """
    info_by_path: dict[KeyPath, FieldInfo] = {}
    for name, info in model.model_fields.items():
        if (inner_table := table_in(info)) is not None:
            info_by_path |= fields(inner_table, (*table, name))
        else:
            info_by_path[(*table, name)] = info
    return info_by_path


def table_in(info: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the table that a key holds, or None if the key holds a value.

    The table may be optional. A list of tables is treated as a value.
    """
    return None if get_origin(info.annotation) is tuple else _table_class(info)


def _table_class(info: FieldInfo) -> type[BaseModel] | None:
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def holds_text(path: KeyPath) -> bool:
    """Return True if, in at least one method, the key accepts text and no number, boolean or list.

    This includes the keys inside a table of texts, such as `labels`.
    """
    infos = (fields(kind).get(path) for kind in KINDS.values())
    type_options = [(info.annotation, *get_args(info.annotation)) for info in infos if info]
    other_types = (bool, int, float)
    tables = (fields(kind).get(path[:-1]) for kind in KINDS.values())
    return any(info.annotation == dict[str, str] for info in tables if info) or any(
        str in types
        and not any(kind in other_types or get_origin(kind) in (list, tuple) for kind in types)
        for types in type_options
    )


def refusal_of(error: ValidationError, table: type[BaseModel]) -> InvalidInput:
    """Return one error that lists all problems of a job or table by key, without file and lines."""
    problems = [f"{'.'.join(path)}: {message}" for path, message in problems_of(error, table)]
    return InvalidInput(render_problems("", problems))


Table.explain_error = staticmethod(refusal_of)


def render_problems(name: str, problems: Sequence[str]) -> str:
    """Return the text of one or more problems.

    One problem is returned unchanged. Several problems get a line each, under a heading with their
    number and `name`, the name of the job file ("" if there is no file).
    """
    if len(problems) == 1:
        return problems[0]
    heading = ": ".join(filter(None, (name, f"{len(problems)} problems")))
    return "\n  ".join([heading, *problems])


def problems_of(error: ValidationError, table: type[BaseModel]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, message) for each problem of a job or of one of its tables.

    If all jobs with this table have it at the same place, the key is the full path in the job.
    Otherwise the key is the path inside the table.
    """
    places = [(kind, path) for kind in KINDS.values() for path in _paths_of(table, kind)]
    is_unique = len({path for _, path in places}) == 1
    model, prefix = places[0] if is_unique else (table, ())
    for detail in error.errors(include_url=False):
        yield from describe({**detail, "loc": (*prefix, *detail["loc"])}, model)


def _paths_of(table: type[BaseModel], model: type[BaseModel]) -> Iterator[KeyPath]:
    """Yield the path of each key that holds a table of the class `table`, in a job of the class
    `model`.
    """
    if table is model:
        yield ()
    for name, info in model.model_fields.items():
        if (inner_table := table_in(info)) is not None:
            yield from ((name, *path) for path in _paths_of(table, inner_table))


def describe(
    error: ErrorDetails, model: type[BaseModel] = OnPolicyJob
) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, message) for one pydantic error of `model`.

    If a table is missing, there is one message for each required key of the table. If a list lacks
    a value, the key is the key of the list.
    """
    path = tuple(str(part) for part in error["loc"])
    match error["type"]:
        case "missing":
            if path[:-1] in fields(model):
                yield path[:-1], f"has too few values (got {_format_value(error['input'])})"
            listed = _listed_table(path[:-1], model)
            required = fields(listed, path[:-1]) if listed else fields(model)
            for key, info in required.items():
                if key[: len(path)] == path and info.is_required():
                    yield key, f"missing; {(info.description or '').rstrip('.')}"
        case "extra_forbidden":
            yield path, f"unknown key{_suggest_key(path, model)}"
        case "literal_error":
            expected_values = error["ctx"]["expected"].replace(" or ", ", ")
            if path == ("method", "type"):
                expected_values = ", ".join(map(repr, KINDS))
            prefix = "one of " if "," in expected_values else ""
            yield path, f"got {_format_value(error['input'])}, expected {prefix}{expected_values}"
        case "model_type" | "model_attributes_type" | "dataclass_type" | "dict_type":
            yield path, f"must be a table (got {_format_value(error['input'])})"
        case "tuple_type":
            yield (
                path,
                f"must be a valid array{_array_example(path, model)}"
                f" (got {_format_value(error['input'])})",
            )
        case _:
            message = _PYDANTIC_SUBJECT.sub("must ", error["msg"].removeprefix("Value error, "))
            yield path, f"{message} (got {_format_value(error['input'])})"


def _array_example(path: KeyPath, model: type[BaseModel]) -> str:
    """Return the end of a message: an example of the list that the key expects, or ""."""
    if (info := fields(model).get(path)) is None:
        return ""
    if _table_class(info) is not None:
        return f" of tables, each under [[{'.'.join(path)}]]"
    return f" such as {info.examples[0]}" if info.examples else ""


def _suggest_key(path: KeyPath, model: type[BaseModel]) -> str:
    """Return the end of a message about an unknown key: the key that the user may mean, or ""."""
    table, name = path[:-1], path[-1]
    if (listed := _listed_table(table, model)) is not None:
        known_keys = ", ".join(map(repr, listed.model_fields))
        return (
            _suggest_similar(name, listed.model_fields)
            or f"; the keys of {'.'.join(table)} are {known_keys}"
        )
    keys = _all_keys(model)
    if "." in name and (*table, *name.split(".")) in keys:
        *outer_names, inner_name = name.split(".")
        nested_table = f'{{"{inner_name}": ...}}'
        for outer_name in outer_names[:0:-1]:
            nested_table = f'{{"{outer_name}": {nested_table}}}'
        return f'; write it as a nested table: "{outer_names[0]}": {nested_table}'
    if kinds := [repr(kind) for kind, job_class in KINDS.items() if path in _all_keys(job_class)]:
        return f"; only a job with method.type = {' or '.join(kinds)} has it"
    if (key := _KEYS_BY_FOREIGN_NAME.get(name)) in keys:
        return _suggest(key, table)
    table_keys = [key[-1] for key in keys if key[:-1] == table]
    if similar := _suggest_similar(name, table_keys):
        return similar
    if same_name_keys := [key for key in keys if key[-1] == name]:
        return "; it belongs to " + " or ".join(_table_of(key) for key in same_name_keys)
    if not table and (methods := difflib.get_close_matches(name, KINDS, n=1, cutoff=0.75)):
        return f"; did you mean method.type = {methods[0]!r}?"
    # If two keys have the same name, prefer the one in the same table.
    names = {key[-1]: key for key in sorted(keys, key=lambda key: key[:-1] == table)}
    if similar_names := difflib.get_close_matches(name, names, n=1):
        return _suggest(names[similar_names[0]], table)
    return ""


def _suggest(key: KeyPath, table: KeyPath) -> str:
    if key[:-1] == table:
        return f"; did you mean '{key[-1]}'?"
    place = "" if len(key) > 1 else " at the top of the file"
    return f"; did you mean '{'.'.join(key)}'{place}?"


def _suggest_similar(name: str, names: Iterable[str]) -> str:
    similar_names = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean '{similar_names[0]}'?" if similar_names else ""


def _listed_table(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the class of a table in a list, or None if `path` is not the path of such a table.

    The last two parts of the path are the key of the list and an index.
    """
    if not path or not path[-1].isdigit():
        return None
    info = fields(model).get(path[:-1])
    return None if info is None else _table_class(info)


def _all_keys(model: type[BaseModel]) -> list[KeyPath]:
    return [*dict.fromkeys([*fields(model), *((table,) for table in model.model_fields)])]


def _table_of(key: KeyPath) -> str:
    return f"[{'.'.join(key[:-1])}]" if len(key) > 1 else "the top of the file"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(redact_place(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
