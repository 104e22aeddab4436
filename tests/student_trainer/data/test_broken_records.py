"""A broken record in the middle of a large file gives the same error as in a file of three."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from clients.config.tables.data import DataConfig
from protos.errors import InvalidInput
from student_trainer.data.prompts import ModelIds, load_prompts
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN
from tests.student_trainer import tiny

TEXTS = {"prompt_column": "prompt", "weight_column": "weight"}
TALKS = {"messages_column": "messages"}
GOOD_TEXT = {"prompt": "1+1=", "answer": "2", "weight": 1, "teacher": "a"}
GOOD_TALK = {"messages": [{"role": "user", "content": "1"}], "teacher": "a"}
# It writes no message of a tool.
TEMPLATE = PLAIN.replace("m in messages", "m in messages if m.role != 'tool'")
LARGE = 9001  # more than two batches of the cache


def with_message(**message: Any) -> dict[str, Any]:
    return {**GOOD_TALK, "messages": [message, {"role": "assistant", "content": "1"}]}


BROKEN: dict[str, tuple[dict[str, str], bytes | dict[str, Any]]] = {
    "not JSON": (TEXTS, b'{"prompt": '),
    "not an object": (TEXTS, b'["prompt"]'),
    "not UTF-8": (TEXTS, b'{"prompt": "\xe9"}'),
    "nested too deeply": (TEXTS, b"[" * 100_000),
    "no prompt": (TEXTS, {"question": "1"}),
    "null": (TEXTS, {**GOOD_TEXT, "prompt": None}),
    "a boolean": (TEXTS, {**GOOD_TEXT, "prompt": True}),
    "NaN": (TEXTS, {**GOOD_TEXT, "prompt": math.nan}),
    "a list": (TEXTS, {**GOOD_TEXT, "prompt": ["1"]}),
    "an object as answer": (TEXTS, {**GOOD_TEXT, "answer": {"text": "1"}}),
    "no tokens": (TEXTS, {**GOOD_TEXT, "prompt": ""}),
    "a token that the model lacks": (TEXTS, {**GOOD_TEXT, "prompt": "1Z"}),
    "a negative weight": (TEXTS, {**GOOD_TEXT, "weight": -1}),
    "a weight as text": (TEXTS, {**GOOD_TEXT, "weight": "much"}),
    "no weight": (TEXTS, {"prompt": "1", "teacher": "a"}),
    "another teacher": (TEXTS, {**GOOD_TEXT, "teacher": "c"}),
    "no messages": (TALKS, {"messages": "1", "teacher": "a"}),
    "an unknown role": (TALKS, with_message(role="human", content="1")),
    "an unknown speaker": (TALKS, with_message(**{"from": "robot", "value": "1"})),
    "no content": (TALKS, with_message(role="user", content=None)),
    "a number as content": (TALKS, with_message(role="user", content=1)),
    "a wrong tool call": (TALKS, with_message(role="user", content="1", tool_calls="f")),
    "a wrong flag": (TALKS, with_message(role="user", content="1", weight=2)),
    "a dropped part": (TALKS, with_message(role="tool", content="1")),
    "no question": (TALKS, {**GOOD_TALK, "messages": [{"role": "assistant", "content": "1"}]}),
}


def error_of(path: Path, columns: dict[str, str], broken: bytes, count: int) -> tuple[str, str]:
    """Return the field and the message, with N for the row of the broken record."""
    good = json.dumps(GOOD_TEXT if columns is TEXTS else GOOD_TALK).encode()
    half = count // 2
    path.write_bytes(b"\n".join([good] * half + [broken] + [good] * half) + b"\n")
    words = tiny.tokenizer(f"{CHARACTERS}Z")  # Z has the last id, which the model lacks
    words.chat_template = None if columns is TEXTS else TEMPLATE
    ids = ModelIds.of_tokenizer(words, words.convert_tokens_to_ids("Z"))
    for _ in range(2):  # a second attempt checks again
        with pytest.raises(InvalidInput) as caught:
            load_prompts(
                DataConfig(path=str(path), **columns),
                words,
                **{"held_out": 1, "max_tokens": 99, "seed": 0, "teachers": ("a", "b")},
                model_ids=ids,
            )
    error = caught.value
    for place in (f"row {half + 1} of", f"{path}:{half + 1} "):
        if place in error.message:
            return error.field, error.message.replace(place, "ROW ") + error.hint
    raise AssertionError(f"{error} names no row")


@pytest.mark.parametrize("name", BROKEN)
def test_the_size_of_the_file_changes_no_error(name: str, tmp_path: Path) -> None:
    columns, broken = BROKEN[name]
    line = broken if isinstance(broken, bytes) else json.dumps(broken).encode()
    small, large = (error_of(tmp_path / "a.jsonl", columns, line, n) for n in (3, LARGE))
    assert small == large
