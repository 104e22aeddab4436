"""The same records in several formats give the same tokens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.config.tables.data import DataConfig
from clients.data.records import DataSet
from clients.store.record_cache import open_records
from student_trainer.data.prompts import ItemsOfSteps, Prompt, load_prompts
from tests.student_trainer import tiny

TEMPLATE = "{{ messages }}{{ tools }}{% if add_generation_prompt %}A{% endif %}"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\u00b5\u20ac\U0001f600"


def record_of(number: int) -> Mapping[str, Any]:
    """Return a conversation whose values are nested, and differ in their keys from row to row.

    The order of keys is the same in all rows, because Arrow has one order for a column.
    """
    arguments = {"more": {"list": [number, number + 1], "empty": []}, f"key_{number % 7}": number}
    call = {"id": f"c{number}", "type": "function"}
    micro_signs = "\u00b5" * (number % 5)
    function = {"name": f"f{number % 3}", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f'Question {number}:\n\t\u20ac "{micro_signs}" \U0001f600'},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "content": f"{number / 7}", "tool_call_id": f"c{number}"},
    ]
    if number % 2:
        messages = [messages[0]]
    answer = {"role": "assistant", "content": f"{number / 8}"}
    return {"messages": [*messages, answer], "weight": number / 4, "note": None}


def write_formats(root: Path, records: list[Mapping[str, Any]]) -> Iterator[str]:
    """Write the records in each format, and yield the paths."""
    lines = [
        json.dumps(record, ensure_ascii=number % 3 > 0) for number, record in enumerate(records)
    ]
    text = "\n".join(lines)
    (root / "a.jsonl").write_text(text)
    yield str(root / "a.jsonl")
    with gzip.open(root / "a.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as packed:
        packed.write(text)
    yield str(root / "a.jsonl.gz")
    with pa.CompressedOutputStream(str(root / "a.jsonl.zst"), "zstd") as stream:
        stream.write(text.encode())
    yield str(root / "a.jsonl.zst")
    (root / "a.json").write_text(json.dumps(records, indent=1))
    yield str(root / "a.json")
    table = pa.Table.from_pylist([dict(record) for record in records])
    pyarrow.parquet.write_table(table, root / "a.parquet", row_group_size=len(records) // 3 + 1)
    yield str(root / "a.parquet")
    datasets.Dataset(table).save_to_disk(str(root / "saved"))
    yield str(root / "saved")
    (root / "parts").mkdir()
    third = len(records) // 3
    (root / "parts/0.jsonl").write_text("\ufeff" + "\r\n".join(lines[:third]) + "\r\n\r\n")
    with gzip.open(root / "parts/1.json.gz", "wt", encoding="utf-8", compresslevel=1) as packed:
        json.dump(records[third : 2 * third], packed)
    pyarrow.parquet.write_table(table.slice(2 * third), root / "parts/2.parquet")
    yield str(root / "parts/*")


def read_tokens(path: str, words: Any, count: int) -> list[tuple[list[int], str, float]]:
    """Return the prompts of an epoch in order, then the held-out ones."""
    data = DataConfig(path=path, messages_column="messages", weight_column="weight")
    training: ItemsOfSteps[Prompt]
    training, held_out = load_prompts(data, words, held_out=5, max_tokens=2000, seed=0)
    prompts = [*training.of_step(1, count - 5), *held_out]
    return [(prompt.ids.tolist(), prompt.answer, prompt.weight) for prompt in prompts]


@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.slow)])
def test_nested_records_have_the_same_tokens_in_every_format(count: int, tmp_path: Path) -> None:
    records = [record_of(number) for number in range(count)]
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = TEMPLATE
    expected: list[Any] = []
    for path in write_formats(tmp_path, records):
        assert len(open_records(DataSet(path), [])) == count
        tokens = read_tokens(path, words, count)
        expected = expected or tokens
        assert tokens == expected, path
    assert len({tuple(ids) for ids, _, _ in expected}) == count
    assert {weight for _, _, weight in expected} == {number / 4 for number in range(count)}
    keys = {
        f"key_{n}"
        for n in range(7)
        for ids, _, _ in expected[:99]
        if f"key_{n}" in words.decode(ids)
    }
    assert len(keys) == 7, "the keys of the rows differ"


def test_texts_have_the_same_tokens_in_csv(tmp_path: Path) -> None:
    records = [{"prompt": f'"{n}",\n\u20ac {n / 7}', "answer": f"{n}"} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = ['"{}",{}'.format(r["prompt"].replace('"', '""'), r["answer"]) for r in records]
    (tmp_path / "a.csv").write_text("\r\n".join(["prompt,answer", *rows]))
    with gzip.open(tmp_path / "a.csv.gz", "wt") as packed:
        packed.write(
            "\n".join(["prompt;answer", *(row[::-1].replace(",", ";", 1)[::-1] for row in rows)])
        )
    words = tiny.tokenizer(CHARACTERS)
    tokens = []
    for name in ("a.jsonl", "a.csv", "a.csv.gz"):
        data = DataConfig(path=str(tmp_path / name), prompt_column="prompt")
        training, held_out = load_prompts(data, words, held_out=5, max_tokens=99, seed=0)
        prompts = [*training.of_step(1, 45), *held_out]
        tokens.append([(prompt.ids.tolist(), prompt.answer) for prompt in prompts])
    assert tokens[0] == tokens[1] == tokens[2]
