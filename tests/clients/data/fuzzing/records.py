"""Random records, right and wrong, as files; and what their texts and messages are."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tests.clients.data.fuzzing.renderer import REASONING, Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
_WORDS = (
    *("the", "roller", "17", "+25=", "42", "as", "class", "x < y", "a|b", "{name}", "{{ bos }}"),
    *(
        "{% if %}",
        "\u00e9",
        "\u00fc\u0308",
        "\u65e5\u672c",
        "\U0001f993",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "\u202eabc",
        "\u200b",
        "\ufeff",
        "\n",
        "\t",
        "  ",
    ),
    *("\r\n", '"', "\\", "\\n", "</think>", "<think>", "$x^2$", "null", "0", "\x7f", "\u2028"),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 7, 1.5, 72.0, 1e16, 1e-5, 0.1, 10**30, float("inf"), float("-inf")),
    *(float("nan"), "", " ", [], {}, ["a"], {"a": 1}, [None], [[]], "\ud800", "a\udc00b", "\x00"),
)


def make_text(random: Random, words: int = 6) -> str:
    """Return some words, sometimes none, with and without spaces between them."""
    parts = [random.choice(_WORDS) for _ in range(random.randrange(words + 1))]
    return random.choice(["", " "]).join(parts)


def make_pair(random: Random) -> dict[str, Any]:
    """Return a record of a prompt and an answer; sometimes numbers, sometimes further columns."""
    values: list[Any] = [make_text(random, 8) or "?", make_text(random)]
    for place in (0, 1):
        if random.random() < 0.1:
            values[place] = random.choice([0, 42, -7, 72.0, 0.1, 1e16, 2.5e-7, 10**25])
    return {"prompt": values[0], "answer": values[1]}


def make_conversation(random: Random) -> dict[str, Any]:
    """Return a record of messages; sometimes with tools, calls and reasoning."""
    messages: list[dict[str, Any]] = []
    if random.random() < 0.3:
        messages.append({"role": random.choice(["system", "system", "developer"])})
    for _ in range(random.randrange(1, 4)):
        messages += [{"role": "user"}, {"role": "assistant"}]
        if random.random() < 0.15:
            messages += [{"role": "tool"}, {"role": "assistant"}]
    if random.random() < 0.1:
        messages.append({"role": "user"})
    for message in messages:
        message["content"] = make_text(random) or "."
    record: dict[str, Any] = {"messages": messages}
    answers = [message for message in messages if message["role"] == "assistant"]
    for answer in answers:
        if random.random() < 0.08:
            answer["tool_calls"] = [_make_call(random)]
            if random.random() < 0.5:
                del answer["content"]
        if random.random() < 0.08:
            answer[random.choice(REASONING)] = make_text(random) or "hm"
    if random.random() < 0.15:
        tools = [_make_tool(random) for _ in range(random.randrange(1, 3))]
        forms: list[Any] = [
            tools,
            json.dumps(tools),
            [json.dumps(tool) for tool in tools],
            [],
            None,
        ]
        record["tools"] = random.choice(forms)
    return record


def spoil(random: Random, record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a record with one value replaced, moved or deleted."""
    copy = json.loads(json.dumps(record))
    paths = list(_paths_in(copy))
    *path, key = random.choice(paths)
    parent = copy
    for part in path:
        parent = parent[part]
    match random.randrange(4):
        case 0 if isinstance(parent, dict):
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[str(key) + random.choice(["x", " ", "X"])] = parent.pop(key)
        case _:
            parent[key] = random.choice(_JUNK)
    return copy


def write_lines(random: Random, records: Sequence[Any]) -> bytes:
    """Return a .jsonl file in one of the ways to write it; sometimes damaged."""
    lines = []
    for record in records:
        text = json.dumps(record, ensure_ascii=random.random() < 0.5)
        data = text.encode("utf-8", "surrogatepass" if random.random() < 0.5 else "replace")
        lines.append(data)
        if random.random() < 0.05:
            lines.append(random.choice([b"", b"   ", b"\t"]))
    data = random.choice([b"\n", b"\n", b"\r\n"]).join(lines) + random.choice([b"", b"\n"])
    if random.random() < 0.05:
        data = b"\xef\xbb\xbf" + data
    if random.random() < 0.1:
        data = _damage(random, data)
    return data


def read_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file. Raises Refusal."""
    records = []
    for line in data.split(b"\n"):
        try:
            text = line.decode("utf-8").removeprefix("\ufeff").strip()
            if text:
                records.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise Refusal("no JSON") from error
        if text and not isinstance(records[-1], dict):
            raise Refusal("no object")
    return [_replace_surrogates(record) for record in records]


def write_table(random: Random, records: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Return a .parquet file; None if Arrow cannot hold the records. Sometimes damaged."""
    try:
        table = pa.Table.from_pylist([dict(record) for record in records])
        for number, field in enumerate(table.schema):
            column = table.column(number)
            if pa.types.is_string(field.type) and random.random() < 0.3:
                kind = random.choice([pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
                table = table.set_column(number, field.name, column.cast(kind))
            elif pa.types.is_float64(field.type) and random.random() < 0.3:
                table = table.set_column(number, field.name, column.cast(pa.float32()))
        file = io.BytesIO()
        group = random.choice([None, 1, 2])
        codec = random.choice(["snappy", "zstd", "none"])
        pa.parquet.write_table(table, file, row_group_size=group, compression=codec)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, NotImplementedError):
        return None
    return _damage(random, file.getvalue()) if random.random() < 0.1 else file.getvalue()


def read_table(data: bytes) -> list[dict[str, Any]]:
    """Return the records of a .parquet file, without nulls inside values. Raises Refusal."""
    try:
        table = pa.parquet.ParquetFile(io.BytesIO(data)).read()
        narrow = {f.name for f in table.schema if f.type in (pa.float32(), pa.float16())}
        records = table.to_pylist()
    except Exception as error:
        raise Refusal("no Parquet") from error
    return [
        {
            name: float(str(np.float32(value)))
            if name in narrow and isinstance(value, float)
            else _without_nulls(value)
            for name, value in record.items()
        }
        for record in records
    ]


def read_text(record: Mapping[str, Any], column: str) -> str:
    """Return the text in a column; of a number, its shortest decimal. Raises Refusal."""
    value = record.get(column)
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Refusal(f"{column} has no text")
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="-")


def read_messages(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages of a record, without null keys, and its tools. Raises Refusal."""
    listed = record.get("messages")
    if not isinstance(listed, list):
        raise Refusal("no messages")
    messages = []
    for message in listed:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Refusal("no role")
        message = {key: value for key, value in message.items() if value is not None}
        may_be_silent = message["role"] == "assistant" and message.get("tool_calls")
        is_silent = "content" not in message and may_be_silent
        if not is_silent and not isinstance(message.get("content"), str):
            raise Refusal("no content")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refusal("no tool calls")
        messages.append(message)
    return messages, _read_tools(record.get("tools"))


def _read_tools(value: Any) -> Any:
    if value is None:
        return None
    try:
        listed = json.loads(value) if isinstance(value, str) else value
        if not isinstance(listed, list):
            raise Refusal("not a list of tools")
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in listed]
    except ValueError as error:
        raise Refusal("not a list of tools") from error
    if not all(isinstance(tool, dict) for tool in tools):
        raise Refusal("no tools")
    return tools or None


def _make_tool(random: Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": random.choice(["weather", "sum"]), "parameters": schema}
    return {"type": "function", "function": function} if random.random() < 0.8 else function


def _make_call(random: Random) -> dict[str, Any]:
    arguments: Any = random.choice([{"city": "\u00e9"}, '{"city": "x"}'])
    function = {"name": random.choice(["weather", "sum"]), "arguments": arguments}
    return {"type": "function", "function": function} if random.random() < 0.8 else function


def _paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in list(entries):
        yield (*path, key)
        if isinstance(entry, (dict, list)):
            yield from _paths_in(entry, (*path, key))


def _damage(random: Random, data: bytes) -> bytes:
    if not data:
        return data
    place = random.randrange(len(data))
    match random.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return (
                data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
            )
        case 2:
            return (
                data[:place] + random.choice([b"\xff", b"\x00", b"\n", b"{", b'"']) + data[place:]
            )
        case _:
            return random.choice([b"", data * 2, data.decode("latin-1").encode("utf-16")])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return "".join("?" if 0xD800 <= ord(letter) < 0xE000 else letter for letter in value)
    if isinstance(value, dict):
        return {_replace_surrogates(k): _replace_surrogates(v) for k, v in value.items()}
    return [_replace_surrogates(entry) for entry in value] if isinstance(value, list) else value
