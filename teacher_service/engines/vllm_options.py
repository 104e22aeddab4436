"""Further options of vLLM for a teacher: `distill-teacher --engine-option NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from protos.errors import InvalidInput
from protos.vllm_processes import set_environment

OPTION = "--engine-option"
# They divide the work over processes, and change the rows by rounding only.
_DIVIDES = "parallel"


def read_options(given: Sequence[str], own: Collection[str]) -> dict[str, Any]:
    """Return the options `given`, each NAME=VALUE, for vLLM's AsyncEngineArgs.

    A value is JSON, such as 2, true or {"a": 1}, or else text. `own`: names of the options that the
    engine sets itself. Raises InvalidInput (--engine-option) for one of those, for a name that vLLM
    does not have, and for a name that is given twice.
    """
    if not given:
        return {}
    set_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    found: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise _refused(f"{option!r} is not NAME=VALUE", "write pipeline_parallel_size=2")
        if name not in known:
            raise _refused(f"vLLM has no option {name!r}", "names are those of AsyncEngineArgs")
        if name in own:
            raise _refused(f"the teacher sets {name} itself", "leave it out")
        if name in found:
            raise _refused(f"{name} is given twice", "give it once")
        found[name] = _value(value)
    return found


def facts_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may change rows, for the fingerprint; {} if there is none."""
    changing = {name: value for name, value in options.items() if _DIVIDES not in name}
    return {"options": changing} if changing else {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refused(message: str, hint: str) -> InvalidInput:
    return InvalidInput(message, field=OPTION, hint=hint)
