"""Limits that a job does not set fit the models and the data; what it sets is never changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyJob, parse_job
from clients.config.on_policy import OnPolicyJob
from clients.data.models.shape import context_of
from clients.preflight.columns import fit_columns
from clients.preflight.limits import (
    NO_LIMITS,
    Limits,
    check_lengths,
    check_room,
    fit_limits,
    is_set,
    read_limits,
    resumed_limits,
    write_limits,
)
from clients.runs.started_services import connected, write_address
from protos.errors import InvalidInput

KEYS = {
    "on_policy": ("max_prompt_tokens", "max_new_tokens"),
    "rl": ("max_prompt_tokens", "max_new_tokens"),
    "sft": ("max_tokens", "max_new_tokens"),
    "capture": ("max_tokens",),
    "eval": ("max_new_tokens",),
}


def make_job(
    folder: Path, kind: str, context: int = 1 << 20, records: int = 2000, **tables: Any
) -> AnyJob:
    """Return a job for a student with a context and a data set; `tables`: values of its keys."""
    student = folder / "student"
    student.mkdir(exist_ok=True)
    (student / "config.json").write_text(json.dumps({"n_positions": context}))
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * records)
    values: dict[str, Any] = {
        "student": {"model": str(student)},
        "data": {"path": str(data)},
        **tables,
    }
    values["method"] = {"type": kind, **tables.get("method", {})}
    if kind in ("rl", "eval"):
        values["reward"] = {"type": "exact_match"}
    return parse_job(json.dumps(values))


def test_the_job_of_a_started_teacher_is_valid(tmp_path: Path) -> None:
    """The trainer's job has the address of its teacher in place of the keys of the model."""
    job = make_job(
        tmp_path, "on_policy", teacher={"model": "teacher", "batch_invariant": True, "top_k": 8}
    )
    write_address(tmp_path, "localhost:1")
    assert isinstance(job, OnPolicyJob)
    started = connected(job, tmp_path)
    assert OnPolicyJob.model_validate(started.model_dump(exclude_unset=True)) == started
    assert started.teacher.top_k == 8
    assert fit_columns(started, started.data_files) == fit_columns(job, job.data_files)
    Path(job.data.path).write_text('{"instruction": "1+1=", "output": "2"}\n')
    columns, layout = fit_columns(started, started.data_files)
    assert columns["data.prompt_column"] == "instruction"
    assert (columns, layout) == fit_columns(job, job.data_files)


def lengths(job: AnyJob) -> tuple[int, ...]:
    return tuple(getattr(job.method, key) for key in KEYS[job.method.type])


@pytest.mark.parametrize(
    ("kind", "context", "teacher", "method", "expected"),
    [
        ("on_policy", 4096, 4096, {}, (512, 256)),
        ("on_policy", 4096, 512, {"max_new_tokens": 24}, (488, 24)),
        ("on_policy", 512, 4096, {}, (256, 256)),
        ("on_policy", 600, 4096, {}, (344, 256)),
        ("on_policy", 600, 4096, {"max_prompt_tokens": 512}, (512, 88)),
        ("on_policy", 64, 48, {}, (24, 24)),
        ("on_policy", 600, 4096, {"max_prompt_tokens": 512, "max_new_tokens": 256}, (512, 256)),
        ("rl", 1200, 0, {}, (512, 688)),
        ("sft", 1024, 0, {}, (1024, 256)),
        ("sft", 1024, 0, {"max_tokens": 2048}, (2048, 256)),
        ("capture", 64, 1024, {}, (1024,)),
        ("eval", 1024, 0, {}, (512,)),
    ],
)
def test_lengths(
    tmp_path: Path,
    kind: str,
    context: int,
    teacher: int,
    method: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    """In a capture the student's model is only its tokenizer."""
    job = make_job(tmp_path, kind, context, method=method)
    fitted = fit_limits(job, {"teacher": teacher} if teacher else {}).apply(job)
    assert lengths(fitted) == expected
    assert fit_limits(fitted).values == {}


def test_an_evaluated_fine_tuning_leaves_room_for_the_sampled_answers(tmp_path: Path) -> None:
    job = make_job(tmp_path, "sft", 1024, eval={"metric": "exact_match"})
    assert lengths(fit_limits(job).apply(job)) == (768, 256)


@pytest.mark.parametrize(
    ("records", "tables", "expected"),
    [
        (2000, {}, (128, 32)),
        (64, {}, (6, 6)),
        (5, {}, (1, 1)),
        (64, {"eval": {"prompts": 128}}, (128, 6)),
        (64, {"train": {"prompts_per_step": 32}}, (6, 32)),
        (64, {"train": {"processes": 8}}, (8, 8)),
        (640, {"data": {"eval_path": "e.jsonl"}}, (128, 32)),
    ],
)
def test_counts(
    tmp_path: Path, records: int, tables: dict[str, Any], expected: tuple[int, int]
) -> None:
    tables = {**tables, "data": {"path": str(tmp_path / "data.jsonl"), **tables.get("data", {})}}
    job: Any = make_job(tmp_path, "sft", records=records, **tables)
    fitted = fit_limits(job).apply(job)
    assert (fitted.eval.prompts, fitted.train.prompts_per_step) == expected


def test_the_reader_of_json_knows_what_is_set(tmp_path: Path) -> None:
    job: Any = make_job(tmp_path, "on_policy", method={"max_prompt_tokens": 512}, records=64)
    copy: Any = parse_job(job.model_dump_json())
    assert copy == job
    assert copy.method.max_new_tokens == 256
    assert is_set(copy, "method.max_prompt_tokens")
    assert not is_set(copy, "method.max_new_tokens")
    assert fit_limits(copy, {"teacher": 600}) == fit_limits(job, {"teacher": 600})


def test_a_resumed_run_keeps_its_limits(tmp_path: Path) -> None:
    """The teacher of the second attempt reads more, and the data has grown."""
    job = make_job(tmp_path, "on_policy", records=64)
    assert read_limits(tmp_path) is None
    write_limits(tmp_path, fit_limits(job, {"teacher": 300}))
    resumed = read_limits(tmp_path)
    assert isinstance(resumed, Limits)
    assert resumed.values == {
        "method.max_prompt_tokens": 150,
        "method.max_new_tokens": 150,
        "eval.prompts": 6,
        "train.prompts_per_step": 6,
    }
    assert str(resumed).startswith("method.max_prompt_tokens = 150 (the teacher reads 300 tokens);")


def test_a_run_without_a_checkpoint_gets_new_limits(tmp_path: Path) -> None:
    """Its data may have been mended since; an evaluation continues the answers on disk."""
    job, stored = make_job(tmp_path, "on_policy", records=64), Limits({"eval.prompts": 6})
    write_limits(tmp_path, stored)
    assert resumed_limits(job, tmp_path) is None
    assert resumed_limits(make_job(tmp_path, "eval"), tmp_path) == stored
    (tmp_path / "checkpoints" / "step-000050").mkdir(parents=True)
    assert resumed_limits(job, tmp_path) == stored
    (tmp_path / "limits.json").unlink()
    assert resumed_limits(job, tmp_path) == NO_LIMITS, "an earlier version started it"


@pytest.mark.parametrize(
    ("method", "field", "hint"),
    [
        (
            {"max_prompt_tokens": 512, "max_new_tokens": 256},
            "method.max_prompt_tokens",
            "set method.max_prompt_tokens to at most 344, or method.max_new_tokens to at most 88",
        ),
        ({"max_new_tokens": 600}, "method.max_new_tokens", "method.max_new_tokens to at most 300"),
        (
            {"max_prompt_tokens": 900},
            "method.max_prompt_tokens",
            "set method.max_prompt_tokens to at most 344",
        ),
        (
            {"max_prompt_tokens": 900, "max_new_tokens": 900},
            "method.max_prompt_tokens",
            "method.max_prompt_tokens to at most 300 and method.max_new_tokens to at most 300",
        ),
    ],
)
def test_the_error_names_the_key_and_a_value_that_works(
    tmp_path: Path, method: dict[str, int], field: str, hint: str
) -> None:
    job = make_job(tmp_path, "on_policy", 600, method=method)
    job = fit_limits(job).apply(job)
    with pytest.raises(InvalidInput, match="the student reads at most 600") as caught:
        check_lengths(job, "student", 600)
    assert caught.value.field == field
    assert hint in caught.value.hint
    remedies = re.findall(r"method\.(\S+) to at most (\d+)", hint.partition(", or ")[0])
    changes = {key: int(value) for key, value in remedies}
    job = make_job(tmp_path, "on_policy", 600, method={**method, **changes})
    check_lengths(fit_limits(job).apply(job), "student", 600)


def test_room_for_an_answer() -> None:
    check_room(500, 100, "student", 600, "")
    hints = {501: "set method.max_new_tokens to at most 99", 600: "shorten to 500"}
    for longest, hint in hints.items():
        with pytest.raises(InvalidInput) as caught:
            check_room(longest, 100, "student", 600, "shorten to")
        assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
        ({"model_type": "mamba"}, None),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            },
            4096,
        ),
    ],
)
def test_context(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(str(tmp_path)) == expected
