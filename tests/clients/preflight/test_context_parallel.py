"""Context parallelism: groups that are refused, and the memory plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.config.file import load_job
from clients.config.kinds import AnyTraining
from clients.config.tables.job import TrainingJob
from clients.data.models.shape import shape_of
from clients.plan.memory import activation_bytes, learning_bytes, scoring_bytes
from clients.plan.memory_plan import load_of, plan_of
from clients.preflight.parallel import check_context_parallel
from protos.errors import InvalidInput
from tests.clients.plan.test_memory import QWEN_7B  # 28 heads of queries, 4 of keys
from tests.clients.plan.test_memory_plan import advised_keys, merge_tables, valid_job
from tests.clients.preflight.test_tensor_parallel import GROUPS, job_file

LONG = {"max_prompt_tokens": 1024, "max_new_tokens": 64512}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([*GROUPS, "context_parallel = 3"], "train.context_parallel: must divide train.processes"),
        (["context_parallel = 2"], "must divide train.processes, which is 1"),
        ([GROUPS[0], "context_parallel = 2"], "train.context_parallel: needs sharding = 'fsdp2'"),
        ([*GROUPS, "context_parallel = 0"], "train.context_parallel: "),
        ([*GROUPS, "context_paralel = 2"], "did you mean 'context_parallel'?"),
        (
            [*GROUPS, "tensor_parallel = 2", "context_parallel = 2"],
            "train.context_parallel: cannot be combined with tensor_parallel",
        ),
        (
            [*GROUPS, "context_parallel = 2", "[student]", "compile = true"],
            "train.context_parallel: cannot divide the tokens of compiled layers",
        ),
    ],
)
def test_the_job_file_is_refused(lines: list[str], sentence: str, tmp_path: Path) -> None:
    path = job_file(tmp_path, *lines)
    if "[student]" in lines:  # the model then moves into the table [student]
        model_line, *other_lines = path.read_text().splitlines()
        path.write_text("\n".join([*other_lines, model_line.removeprefix("student.")]))
    with pytest.raises(InvalidInput) as caught:
        load_job(path)
    assert sentence in str(caught.value)


def load_grouped_job(tmp_path: Path, size: int, **sizes: Any) -> AnyTraining:
    job = load_job(job_file(tmp_path, *GROUPS, f"context_parallel = {size}", **sizes)).config
    assert isinstance(job, TrainingJob)
    return job


def test_heads_that_a_group_cannot_share(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        check_context_parallel(load_grouped_job(tmp_path, size))
    check_context_parallel(load_grouped_job(tmp_path, 8, num_attention_heads=32))
    with pytest.raises(InvalidInput, match="8 processes cannot share the 28 heads") as caught:
        check_context_parallel(load_grouped_job(tmp_path, 8))
    assert (caught.value.field, caught.value.hint) == (
        "train.context_parallel",
        "lower the value to 4",
    )


def test_a_process_learns_from_its_part_of_the_tokens(tmp_path: Path) -> None:
    """Two groups of four: a quarter of the activations, an eighth of the weights."""
    shape = shape_of(QWEN_7B)
    divided = load_of(load_grouped_job(tmp_path, 4), shape)
    undivided = replace(divided, context_parallel=1)
    assert divided.shards == undivided.shards == 8
    output_numbers = 2 * shape.queries  # the outputs of attention are stored twice
    more_bytes = shape.layers * output_numbers * divided.tokens // 4
    activations = learning_bytes(divided)["activations"]
    assert activations == activation_bytes(undivided) // 4 + more_bytes * (
        not divided.checkpointing
    )
    assert 4 * scoring_bytes(divided)["one layer"] == scoring_bytes(undivided)["one layer"]


def test_heads_of_keys_are_repeated(tmp_path: Path) -> None:
    """Four heads of keys for eight processes: as many bytes as eight heads of keys."""
    job = load_grouped_job(tmp_path, 8, num_attention_heads=32)
    group_of_eight = load_of(job, shape_of(QWEN_7B | {"num_attention_heads": 32}))
    group_of_four = replace(group_of_eight, context_parallel=4)
    keys = 2 * 2 * group_of_eight.shape.keys * group_of_eight.shape.layers
    per_token = [
        learning_bytes(load)["activations"] / (load.tokens // load.context_parallel)
        for load in (group_of_eight, group_of_four)
    ]
    assert per_token[0] - per_token[1] == pytest.approx(keys)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_the_plan_advises_it_for_long_sequences(sharding: str) -> None:
    values = {
        "student": {"model": "m", "gradient_checkpointing": True},
        "data": {"path": "p.jsonl"},
        "method": {"type": "on_policy", **LONG},
        "train": {"processes": 8, "sharding": sharding},
    }
    shape = shape_of(QWEN_7B)
    plan = plan_of(valid_job(values), shape, 60)
    (sentence,) = [change for change in plan.changes if "context_parallel" in change]
    advised_plan = plan_of(valid_job(merge_tables(values, advised_keys(sentence, {}))), shape, 60)
    assert advised_plan.fits, sentence
    assert advised_plan.load.sharded
    large_batches = {"tokens_per_micro_batch": 1 << 20, "prompts_per_step": 8192}
    short_answers = {
        "method": {"max_new_tokens": 1024},
        "train": large_batches | {"sharding": "fsdp2"},
    }
    changes = plan_of(valid_job(merge_tables(values, short_answers)), shape, 60).changes
    assert any("tokens_per_micro_batch" in change for change in changes)
    assert not any("context_parallel" in change for change in changes)


def test_the_plan_knows_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(job_file(tmp_path, *GROUPS, "context_parallel = 4"))
    main(["plan", file])
    head = capsys.readouterr().out.splitlines()[0]
    assert "on 8 GPUs, FSDP2 with context parallelism in groups of 4;" in head
    assert main(["plan", file, "--set", "train.context_parallel=8"]) == 2
    assert "train.context_parallel: 8 processes cannot share" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text()) == QWEN_7B
