"""What a job is in one line, and the keys that its user set."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clients.config.kinds import KINDS, parse_job
from clients.config.summary import summary_of

STUDENT: dict[str, Any] = {"student": {"model": "small"}, "data": {"path": "x.jsonl"}}
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (STUDENT, "small <- teacher at localhost:50052, x.jsonl", {}),
    (
        STUDENT | {"teacher": {"model": "large"}, "train": {"learning_rate": 3e-5}, "seed": 7},
        "small <- large, x.jsonl",
        {"train.learning_rate": 3e-5, "seed": 7},
    ),
    (
        STUDENT
        | {"method": {"type": "offline", "top_k": 9}, "data": {"path": "@first/store"}}
        | {"labels": {"project": "math"}, "name": "second", "after": ["third"]},
        "small, @first/store",
        {"method.top_k": 9, "after": ["third"]},
    ),
    (
        {"method": {"type": "capture"}, "data": {"path": "x"}, "teacher": {"model": "large"}},
        "large, x",
        {},
    ),
    (
        STUDENT | {"method": {"type": "eval"}, "reward": {"type": "math"}},
        "small, x.jsonl",
        {"reward.type": "math"},
    ),
    (
        STUDENT | {"method": {"type": "sft", "max_tokens": 9}},
        "small, x.jsonl",
        {"method.max_tokens": 9},
    ),
    (
        STUDENT | {"method": {"type": "rl"}, "reward": {"type": "math"}},
        "small, x.jsonl",
        {"reward.type": "math"},
    ),
]


@pytest.mark.parametrize(("values", "text", "keys"), CASES)
def test_a_job_and_its_stored_form(values: dict[str, Any], text: str, keys: dict[str, Any]) -> None:
    """A server stores all keys, also those that have their defaults."""
    config = parse_job(json.dumps(values))
    for form in (config, parse_job(config.model_dump_json())):
        summary = summary_of(form)
        assert str(summary) == text
        assert dict(summary.changed_keys) == keys
        assert summary.method in KINDS
