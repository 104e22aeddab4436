"""Values of records: numbers as text, and what Arrow adds to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.data.formats import read_start
from clients.data.prompt_format import PromptFormat
from clients.data.records import DataSet, text_of
from protos.errors import InvalidInput

CALLS = [
    {"name": "add", "arguments": {"a": 0, "b": 2}},
    {"name": "find", "arguments": {"city": "Bern", "days": [{"n": 1}, {"m": 2}]}},
]
SCHEMAS = [{"properties": {"a": {"type": "number"}}}, {"properties": {"city": {"enum": ["Bern"]}}}]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        ],
        "tools": [{"type": "function", "function": {"name": call["name"], "schema": schema}}],
    }
    for call, schema in zip(CALLS, SCHEMAS, strict=True)
]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("72", "72"),
        (72, "72"),
        (72.0, "72"),
        (-0.5, "-0.5"),
        (0.1, "0.1"),
        (1e16, "10000000000000000"),
        (1e-5, "0.00001"),
        (10**30, "1" + "0" * 30),
        (123456.789, "123456.789"),
    ],
)
def test_numbers_become_the_shortest_decimal(value: Any, text: str) -> None:
    assert text_of({"answer": value}, "answer", "data.answer_column", "row 1") == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, None, [], {}])
def test_what_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"row 1 has .* in column 'answer', not text") as caught:
        text_of({"answer": value}, "answer", "data.answer_column", "row 1")
    assert caught.value.field == "data.answer_column"


def as_jsonl(records: list[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_all(path: str, *columns: str) -> list[Any]:
    return list(DataSet(path).records(columns))


def test_structs_of_arrow_have_the_keys_of_their_own_row(tmp_path: Path) -> None:
    """In Parquet files and saved directories, at every depth, as in a .jsonl file."""
    expected = read_all(as_jsonl(TALKS, tmp_path / "talks.jsonl"), "messages", "tools")
    assert expected == TALKS
    table = pa.Table.from_pylist(TALKS)
    pyarrow.parquet.write_table(table, tmp_path / "talks.parquet")
    assert table.to_pylist() != TALKS, "Arrow adds keys"
    datasets.Dataset(table).save_to_disk(tmp_path / "talks")
    for name in ("talks.parquet", "talks"):
        found = read_all(str(tmp_path / name), "messages", "tools")
        assert found == TALKS
        form = PromptFormat(messages_column="messages")
        for record, other in zip(found, expected, strict=True):
            assert form.conversation(record, "row 1") == form.conversation(other, "row 1")


def write_parquet(path: Path, array: pa.Array) -> bytes:
    pyarrow.parquet.write_table(pa.table({"prompt": array}), path)
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "bytes", "not UTF-8"])
def test_a_damaged_parquet_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    data = write_parquet(path, pa.array(["a text"] * 100))
    if damage == "cut":
        path.write_bytes(data[:-9])
    elif damage == "bytes":
        path.write_bytes(data[:4] + b"\xff" * 40 + data[44:])
    else:
        latin = pa.array([b"caf\xe9"]).view(pa.binary())
        write_parquet(path, pa.Array.from_buffers(pa.string(), 1, latin.buffers()))
    with pytest.raises(InvalidInput, match="cannot be read as Parquet") as caught:
        read_all(str(path), "prompt")
    assert (caught.value.field, bool(caught.value.hint)) == ("data.path", True)


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_float32_columns_hold_the_decimals_that_were_written(kind: str, tmp_path: Path) -> None:
    table = pa.table({"answer": pa.array([0.1, 2.5, None], pa.float32()), "n": [0.1, 2.5, None]})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    else:
        datasets.Dataset(table).save_to_disk(tmp_path / "data.saved")
    path = str(tmp_path / f"data.{kind}")
    assert read_all(path, "answer", "n") == [
        {"answer": 0.1, "n": 0.1},
        {"answer": 2.5, "n": 2.5},
        {"answer": None, "n": None},
    ]


@pytest.mark.parametrize(
    "records",
    [
        [{"ids": [1, 2]}],
        [{"messages": [{"role": "user", "content": "?"}]}],
        [{"turns": [{"text": "a"}]}, {"turns": [{"text": "b"}]}],
    ],
)
def test_json_lines_of_one_key_are_records(records: list[Any], tmp_path: Path) -> None:
    """A list of numbers, one conversation, and two lines: none is an object that holds records."""
    path = tmp_path / "a.json"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert [record for _, record in DataSet(str(path), field="data.path").rows([])] == records
    assert read_start(str(path), "data.path")[1] == records


def test_long_values_of_parquet_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """pyarrow reads 65,536 rows at once, which may repeat one long value."""
    path, text = tmp_path / "a.parquet", "x" * (1 << 22)
    pa.parquet.write_table(pa.table({"prompt": [text] * 9}), path, use_dictionary=False)
    sizes = []

    class File(pa.parquet.ParquetFile):
        def iter_batches(self, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
            for batch in super().iter_batches(*arguments, **options):
                sizes.append(batch.nbytes >> 20)
                yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pa.parquet, "ParquetFile", File)
        assert sum(1 for _ in DataSet(str(path)).rows(["prompt"])) == 9
        assert sizes == [12, 12, 12]
        sizes.clear()
        assert len(read_start(str(path), "data.path")[1]) == 1
        assert sizes == [4]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "b.csv"])
def test_a_record_of_gigabytes_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed, it has some kilobytes."""
    for module in ("formats", "json_array"):
        monkeypatch.setattr(f"clients.data.{module}.MAX_BYTES", 1 << 21)
    start = {"a.jsonl": '{"prompt": "', "a.json": '[{"prompt": "', "a.csv": "prompt\n"}
    text = "y\n" * (1 << 21) if name == "b.csv" else "x" * (1 << 23)
    (tmp_path / name).write_text(start.get(name, 'prompt\n"') + text)
    with pytest.raises(InvalidInput, match=r"longer than 2 MiB|field larger than field limit"):
        list(DataSet(str(tmp_path / name)).rows(["prompt"]))


def test_records_are_counted_without_values(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"prompt": ["x"] * 7}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "y"}\n\n{"prompt": "z"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(pa.parquet.ParquetFile, "iter_batches")
        data_set = DataSet(str(tmp_path / "*"))
        assert [data_set.count(["prompt"], most) for most in (5, 8, 20)] == [5, 8, 9]
