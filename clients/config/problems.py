"""Turns pydantic's errors about a job into messages with a key, a problem and a suggestion."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from clients.config.kinds import KINDS
from clients.config.lines import KeyPath
from clients.config.on_policy import OnPolicyJob
from clients.data.object_urls import shown

# The start of pydantic's messages, such as "String should have at least 1 character".
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|Tuple|Dictionary) should ")


def fields(
    model: type[BaseModel] = OnPolicyJob, table: KeyPath = ()
) -> Mapping[KeyPath, FieldInfo]:
    """Return every key of `model` that holds a value (tables excluded), by its path."""
    found: dict[KeyPath, FieldInfo] = {}
    for name, info in model.model_fields.items():
        if (inner := table_in(info)) is not None:
            found |= fields(inner, (*table, name))
        else:
            found[(*table, name)] = info
    return found


def table_in(info: FieldInfo) -> type[BaseModel] | None:
    """Return the table class of a key, also of an optional one; None if the key holds a value.

    A list of tables is a value.
    """
    return None if get_origin(info.annotation) is tuple else _table_class(info)


def _table_class(info: FieldInfo) -> type[BaseModel] | None:
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def holds_text(path: KeyPath) -> bool:
    """Return True if some method has this key as a string that cannot be mistaken for others."""
    found = (fields(kind).get(path) for kind in KINDS.values())
    kinds = [(info.annotation, *get_args(info.annotation)) for info in found if info]
    others = (bool, int, float)
    tables = (fields(kind).get(path[:-1]) for kind in KINDS.values())
    return any(info.annotation == dict[str, str] for info in tables if info) or any(
        str in one and not any(kind in others or get_origin(kind) in (list, tuple) for kind in one)
        for one in kinds
    )


def describe(
    error: ErrorDetails, model: type[BaseModel] = OnPolicyJob
) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, message) for one pydantic error of `model`.

    A missing table yields each of its required keys; a missing value of a list, the list's key.
    """
    path = tuple(str(part) for part in error["loc"])
    match error["type"]:
        case "missing":
            if path[:-1] in fields(model):
                yield path[:-1], f"has too few values (got {_shown(error['input'])})"
            listed = _listed_table(path[:-1], model)
            required = fields(listed, path[:-1]) if listed else fields(model)
            for key, info in required.items():
                if key[: len(path)] == path and info.is_required():
                    yield key, f"missing; {(info.description or '').rstrip('.')}"
        case "extra_forbidden":
            yield path, f"unknown key{_suggestion(path, model)}"
        case "literal_error":
            expected = error["ctx"]["expected"].replace(" or ", ", ")
            if path == ("method", "type"):
                expected = ", ".join(map(repr, KINDS))
            among = "one of " if "," in expected else ""
            yield path, f"got {_shown(error['input'])}, expected {among}{expected}"
        case "model_type" | "model_attributes_type" | "dataclass_type" | "dict_type":
            yield path, f"must be a table (got {_shown(error['input'])})"
        case "tuple_type":
            yield (
                path,
                f"must be a valid array{_example(path, model)} (got {_shown(error['input'])})",
            )
        case _:
            message = _PYDANTIC_SUBJECT.sub("must ", error["msg"].removeprefix("Value error, "))
            yield path, f"{message} (got {_shown(error['input'])})"


def _example(path: KeyPath, model: type[BaseModel]) -> str:
    """Return how to write the list of a key, to append to the message; "" if nothing says so."""
    if (info := fields(model).get(path)) is None:
        return ""
    if _table_class(info) is not None:
        return f" of tables, each under [[{'.'.join(path)}]]"
    return f" such as {info.examples[0]}" if info.examples else ""


def _suggestion(path: KeyPath, model: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key, to append to the message; "" if there is none."""
    table, name = path[:-1], path[-1]
    if (listed := _listed_table(table, model)) is not None:
        known = ", ".join(map(repr, listed.model_fields))
        return _near(name, listed.model_fields) or f"; the keys of {'.'.join(table)} are {known}"
    keys = _keys(model)
    if kinds := [repr(kind) for kind, other in KINDS.items() if path in _keys(other)]:
        return f"; only a job with method.type = {' or '.join(kinds)} has it"
    here = [key[-1] for key in keys if key[:-1] == table]
    if found := _near(name, here):
        return found
    if owners := [key for key in keys if key[-1] == name]:
        return "; it belongs to " + " or ".join(_table_of(key) for key in owners)
    # If two keys have the same name, prefer the one in the same table.
    names = {key[-1]: key for key in sorted(keys, key=lambda key: key[:-1] == table)}
    if near := difflib.get_close_matches(name, names, n=1):
        meant = names[near[0]]
        return f"; did you mean '{'.'.join(meant if meant[:-1] != table else meant[-1:])}'?"
    return ""


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean '{near[0]}'?" if near else ""


def _listed_table(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the class of a table in a list, by its path (a key and a number); otherwise None."""
    if not path or not path[-1].isdigit():
        return None
    info = fields(model).get(path[:-1])
    return None if info is None else _table_class(info)


def _keys(model: type[BaseModel]) -> list[KeyPath]:
    return [*fields(model), *((table,) for table in model.model_fields)]


def _table_of(key: KeyPath) -> str:
    return f"[{'.'.join(key[:-1])}]" if len(key) > 1 else "the top of the file"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(shown(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
