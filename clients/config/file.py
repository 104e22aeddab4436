"""Reads job files. An invalid file is refused with all of its problems, each with its line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clients.config.kinds import AnyJob, kind_of
from clients.config.lines import KeyPath, Parsed, SyntaxFault, parse
from clients.config.problems import describe, fields, holds_text
from protos.errors import InvalidInput

MAX_BYTES = 64 << 10
SUFFIXES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class JobFile:
    """A job file after reading: its path, its text, and the validated job.

    `sources` maps each key to the origin of its value: `default`, `job.toml:6` or `--set`.
    """

    path: Path
    text: str
    config: AnyJob
    sources: Mapping[str, str]


@dataclass
class _Draft:
    """A job file in the making: its values and problems before validation."""

    name: str
    parsed: Parsed
    values: dict[str, Any]
    overridden: set[KeyPath] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def source(self, path: KeyPath) -> str:
        if any(path[: len(key)] == key for key in self.overridden):
            return "--set"
        line = self.parsed.line_of(path)
        if not line and any(key[: len(path)] == path for key in self.overridden):
            return "--set"  # the override made a table where a value belongs
        return f"{self.name}:{line}" if line else self.name


def load_job(path: Path | str, overrides: Sequence[str] = ()) -> JobFile:
    """Read a job file, apply `KEY=VALUE` overrides, and validate the job.

    Raises InvalidInput that lists all problems, each with the line of its key.
    """
    path = Path(path)
    text = _read(path)
    try:
        parsed = parse(text, path.suffix.lower())
    except SyntaxFault as fault:
        where = f"{path}:{fault.line}" if fault.line else str(path)
        raise InvalidInput(f"{where}: {fault.message}") from None
    try:
        draft = _Draft(str(path), parsed, _copied(parsed.values))
        for override in overrides:
            _apply(override, draft)
        config = _validated(draft)
    except RecursionError:
        raise InvalidInput(f"{path}: nested too deeply") from None
    if config is None or draft.problems:
        raise InvalidInput(_rendered(draft))
    return JobFile(path, text, config, _sources(draft, config))


# Keys that may name a file on this machine.
FILE_KEYS: tuple[KeyPath, ...] = (
    ("student", "model"),
    ("data", "path"),
    ("data", "eval_path"),
    ("data", "eval_prompts"),
    ("data", "tokenizer"),
    ("teacher", "model"),
    ("teacher", "tokenizer"),
    ("reward", "file"),
    ("environment", "retriever"),
)


def localized(config: AnyJob) -> AnyJob:
    """Return the job with absolute paths for all files that exist on this machine.

    A server needs absolute paths, because its working directory is another one.
    """
    for dotted, name in named_files(config):
        if Path(name).exists():
            config = _replaced(config, tuple(dotted.split(".")), str(Path(name).absolute()))
    return config


def _replaced(of: Any, path: KeyPath, value: str) -> Any:
    """Return a copy of a job, a table or a tuple of tables with another value at `path`."""
    key, *rest = path
    if isinstance(of, tuple):
        changed = _replaced(of[int(key)], tuple(rest), value)
        return (*of[: int(key)], changed, *of[int(key) + 1 :])
    new = _replaced(getattr(of, key), tuple(rest), value) if rest else value
    return of.model_copy(update={key: new})


def named_files(config: AnyJob) -> list[tuple[str, str]]:
    """Return (key, value) of each key that may name a file or directory; URLs are left out."""
    said = [(key, getattr(getattr(config, key[0], None), key[1], None)) for key in FILE_KEYS]
    named = [(".".join(key), name) for key, name in said]
    mixed = getattr(getattr(config, "data", None), "mix", ())
    named += [(f"data.mix.{number}.path", other.path) for number, other in enumerate(mixed)]
    none = ("", None, "same", "auto")  # the last two: of teacher.tokenizer
    return [(key, name) for key, name in named if name not in none and "://" not in name]


def parse_override(override: str) -> tuple[KeyPath, Any]:
    """Parse `a.b=VALUE` into a key path and a value.

    VALUE is parsed as TOML; if that fails, or if the key takes text, it is used as a bare string.
    Raises InvalidInput if `override` is not KEY=VALUE.
    """
    dotted, equals, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(path):
        raise InvalidInput(f"--set: {override!r} is not KEY=VALUE")
    if holds_text(path) and text[:1] not in ('"', "'"):
        return path, text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return path, text
    return path, parsed["value"] if len(parsed) == 1 else text


def _read(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"{path}: a job file ends in .toml, .yaml or .yml")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > MAX_BYTES:
        raise InvalidInput(
            f"{path}: larger than {MAX_BYTES >> 10} KiB; check that it is a job file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{path}:{line}: not UTF-8 text") from None


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in values.items()}


def _apply(override: str, draft: _Draft) -> None:
    try:
        path, value = parse_override(override)
    except InvalidInput as error:
        draft.problems.append(error.message)
        return
    table: Any = draft.values
    for depth, part in enumerate(path[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            inner = ".".join(path[:depth])
            draft.problems.append(f"--set: {'.'.join(path)}: '{inner}' is not a table")
            return
    table[path[-1]] = value
    draft.overridden.add(path)


def _validated(draft: _Draft) -> AnyJob | None:
    try:
        # Validate as JSON, which has no dates, in strict mode: `top_k = true` is an error, not 1.
        document = json.dumps(draft.values, default=str)
    except ValueError:
        # TOML can hold a hexadecimal integer so long that Python refuses to print it (4300 digits).
        draft.problems.append(f"{draft.name}: an integer has thousands of digits")
        return None
    kind = kind_of(draft.values)
    try:
        return kind.model_validate_json(document, strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            for path, message in describe(detail, kind):
                parts = (draft.source(path), ".".join(path), message)
                draft.problems.append(": ".join(filter(None, parts)))
        return None


def _rendered(draft: _Draft) -> str:
    if len(draft.problems) == 1:
        return draft.problems[0]
    lines = "".join(f"\n  {problem}" for problem in draft.problems)
    return f"{draft.name}: {len(draft.problems)} problems{lines}"


def _sources(draft: _Draft, config: AnyJob) -> Mapping[str, str]:
    return {
        ".".join(path): draft.source(path) if _given(draft.values, path) else "default"
        for path in fields(type(config))
    }


def _given(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
