"""Parses the text of a job file into its values and the line number of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

KeyPath = tuple[str, ...]

_TOML_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")
_TOML_LIST_HEADER = re.compile(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$")
_TOML_KEY = re.compile(r"[\w\"'.\- \t]+")
# Finds dotted keys of more than 64 parts: tomllib needs quadratic time for them. The quantifiers
# are possessive, because this search would be quadratic too with backtracking.
_TOML_TOO_DEEP = re.compile(r"(?<![\w\"'.\- \t])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){64}")
_MAX_DEPTH = 64
_YAML_TOO_DEEP = re.compile(r"(?<![\[{])(?:[\[{]\s*+){64}")
_TOML_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


class SyntaxFault(ValueError):
    """The text is not valid TOML or YAML. `line` counts from 1; 0 means unknown."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


@dataclass(frozen=True)
class Parsed:
    """The values of a job file, and the line number of each key. The first line is 1."""

    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def line_of(self, path: KeyPath) -> int:
        """Return the line number of a key.

        If it is unknown, return the line number of the innermost table around the key; 0 if there
        is none.
        """
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


def parse(text: str, suffix: str) -> Parsed:
    """Parse TOML (suffix ".toml") or YAML. Raises SyntaxFault if the text is invalid.

    Deep nesting and YAML aliases are refused: with them, a small file could need any amount of time
    or memory.
    """
    try:
        return _parse_toml(text) if suffix == ".toml" else _parse_yaml(text)
    except RecursionError:
        raise SyntaxFault("nested too deeply") from None


def _parse_toml(text: str) -> Parsed:
    if deep_key := _TOML_TOO_DEEP.search(text):
        raise SyntaxFault("nested too deeply", text.count("\n", 0, deep_key.start()) + 1)
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        position = _TOML_LINE.search(str(error))
        reason = _TOML_LINE.sub("", str(error))
        column = f" (column {position[2]})" if position else ""
        raise SyntaxFault(
            f"not TOML: {reason}{column}", int(position[1]) if position else 0
        ) from None
    return Parsed(values, _toml_lines(text))


def _toml_lines(text: str) -> Mapping[KeyPath, int]:
    # A simple scan: a multi-line string can look like a key, which only yields a wrong line number.
    lines: dict[KeyPath, int] = {}
    lengths: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TOML_HEADER.match(line):
            table = _insert_indices(_toml_path(header[1]), lengths)
            lines.setdefault(table, number)
        elif header := _TOML_LIST_HEADER.match(line):
            *parents, name = _toml_path(header[1])
            listed = (*_insert_indices(tuple(parents), lengths), name)
            lines.setdefault(listed, number)
            lengths[listed] = lengths.get(listed, 0) + 1
            table = (*listed, str(lengths[listed] - 1))
            lines[table] = number
        elif "=" in line and _TOML_KEY.fullmatch(key := line.partition("=")[0]):
            lines.setdefault(table + _toml_path(key), number)
    return lines


def _insert_indices(path: KeyPath, lengths: Mapping[KeyPath, int]) -> KeyPath:
    """Return `path` with an index after the name of each list of tables.

    The index is that of the last table in the list so far, because in TOML the header of an inner
    table refers to this table. `lengths`: number of tables in each list so far.
    """
    full_path: KeyPath = ()
    for part in path:
        full_path = (*full_path, part)
        if length := lengths.get(full_path):
            full_path = (*full_path, str(length - 1))
    return full_path


def _toml_path(dotted: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


class _YamlLoader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A few nested aliases can expand to gigabytes, and a job file needs none.
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        if self._depth == _MAX_DEPTH:
            # Without this limit the parser takes seconds until Python's own recursion limit.
            raise RecursionError
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _integer_or_text(loader: _YamlLoader, node: yaml.ScalarNode) -> int | str:
    """Read 1:59 as text, as YAML 1.2 does; YAML 1.1 reads it as a number in base 60."""
    text = loader.construct_scalar(node)
    return str(text) if ":" in text else int(loader.construct_yaml_int(node))


_YamlLoader.add_constructor("tag:yaml.org,2002:int", _integer_or_text)


# Read 1e-5 as a number, as YAML 1.2 does; YAML 1.1 reads it as text. Learning rates need it.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _parse_yaml(text: str) -> Parsed:
    if _YAML_TOO_DEEP.search(text):
        raise RecursionError
    try:
        loader = _YamlLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Parsed({}, {})
        if not isinstance(root, yaml.MappingNode):
            raise SyntaxFault("must be a mapping of keys to values", root.start_mark.line + 1)
        lines: dict[KeyPath, int] = {}
        for path, line in _yaml_lines(root):
            if path in lines:
                raise SyntaxFault(f"{'.'.join(path)}: given twice", line)
            lines[path] = line
        return Parsed(loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise SyntaxFault(f"not YAML: {error.problem}", mark.line + 1 if mark else 0) from None
    except SyntaxFault:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise SyntaxFault(f"not YAML: {error}") from None


def _yaml_lines(node: yaml.MappingNode, table: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise SyntaxFault("a key must be a word without spaces", key.start_mark.line + 1)
        path = (*table, key.value)
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _yaml_lines(value, path)
        elif isinstance(value, yaml.SequenceNode):
            for number, element in enumerate(value.value):
                if isinstance(element, yaml.MappingNode):
                    yield (*path, str(number)), element.start_mark.line + 1
                    yield from _yaml_lines(element, (*path, str(number)))
