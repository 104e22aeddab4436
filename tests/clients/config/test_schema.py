"""The JSON Schema of job files, checked with jsonschema: what it accepts and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from clients.config.kinds import KINDS, schema_of

ROOT = Path(__file__).parents[3]
FILES = sorted([*ROOT.glob("deploy/jobs/*.toml"), *ROOT.glob("examples/*.toml")])
JOB = {
    "name": "a",
    "student": {"model": "org/model"},
    "teacher": {"address": "localhost:50052"},
    "data": {"path": "train.jsonl"},
}


@pytest.fixture(scope="module")
def schema() -> Any:
    document = json.loads(json.dumps(schema_of([*KINDS.values()])))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_job_files_of_the_project(schema: Any, path: Path) -> None:
    schema.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    "sweep",
    [
        {"train": {"learning_rate": [1e-5, 3e-5]}},
        {"train.learning_rate": [1e-5], "method": {"max_new_tokens": [1]}},
        [{"train.learning_rate": 1e-5}, {"train": {"learning_rate": 3e-5}, "seed": 2}],
    ],
)
def test_sweeps_and_files_of_several_jobs(schema: Any, sweep: Any) -> None:
    job = {**JOB, "method": {"type": "on_policy"}}
    schema.validate({**job, "sweep": sweep})
    schema.validate({"job": [job, {**job, "name": "b", "sweep": sweep}]})


@pytest.mark.parametrize(
    "fault",
    [
        {"sweep": {}},
        {"sweep": [{}]},
        {"sweep": {"train": {"learning_rate": 1e-5}}},
        {"sweep": {"train": {"learning_rate": []}}},
        {"tokenizer": "there is no such key"},
        {"job": [JOB]},
    ],
)
def test_what_is_refused(schema: Any, fault: dict[str, Any]) -> None:
    assert not schema.is_valid({**JOB, "method": {"type": "on_policy"}, **fault})
