"""Groups of processes that share the tokens of sequences: what is refused, and what is planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.config.file import load_job
from clients.config.kinds import AnyTraining
from clients.config.tables.common import TrainingJob
from clients.data.model_shape import shape_of
from clients.preflight.context_parallel import check_context_parallel
from clients.preflight.memory import activation_bytes, learning_bytes, scoring_bytes
from clients.preflight.memory_plan import load_of, plan_of
from protos.errors import InvalidInput
from tests.clients.preflight.test_memory import QWEN_7B  # 28 heads of queries, 4 of keys
from tests.clients.preflight.test_memory_plan import advised, merged, valid
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
    if "[student]" in lines:  # the model is in a table of its own then
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([*rest, first.removeprefix("student.")]))
    with pytest.raises(InvalidInput) as caught:
        load_job(path)
    assert sentence in str(caught.value)


def job_of(tmp_path: Path, size: int, **sizes: Any) -> AnyTraining:
    job = load_job(job_file(tmp_path, *GROUPS, f"context_parallel = {size}", **sizes)).config
    assert isinstance(job, TrainingJob)
    return job


def test_heads_that_a_group_cannot_share(tmp_path: Path) -> None:
    for size in (1, 2, 4):
        check_context_parallel(job_of(tmp_path, size))
    check_context_parallel(job_of(tmp_path, 8, num_attention_heads=32))
    with pytest.raises(InvalidInput, match="8 processes cannot share the 28 heads") as caught:
        check_context_parallel(job_of(tmp_path, 8))
    assert (caught.value.field, caught.value.hint) == ("train.context_parallel", "lower it to 4")


def test_a_process_learns_from_its_part_of_the_tokens(tmp_path: Path) -> None:
    """Two groups of four: a quarter of the activations, an eighth of the weights."""
    shape = shape_of(QWEN_7B)
    divided = load_of(job_of(tmp_path, 4), shape)
    plain = replace(divided, context_parallel=1)
    assert divided.shards == plain.shards == 8
    again = 2 * shape.queries  # the outputs of attention, a second time
    more = shape.layers * again * divided.tokens // 4
    found = learning_bytes(divided)["activations"]
    assert found == activation_bytes(plain) // 4 + more * (not divided.checkpointing)
    assert 4 * scoring_bytes(divided)["one layer"] == scoring_bytes(plain)["one layer"]


def test_heads_of_keys_are_repeated(tmp_path: Path) -> None:
    """Four heads of keys for eight processes: as many bytes as eight heads of keys."""
    job = job_of(tmp_path, 8, num_attention_heads=32)
    few = load_of(job, shape_of(QWEN_7B | {"num_attention_heads": 32}))
    more = replace(few, context_parallel=4)
    keys = 2 * 2 * few.shape.keys * few.shape.layers
    per_token = [
        learning_bytes(one)["activations"] / (one.tokens // one.context_parallel)
        for one in (few, more)
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
    plan = plan_of(valid(values), shape, 60)
    (sentence,) = [one for one in plan.changes if "context_parallel" in one]
    found = plan_of(valid(merged(values, advised(sentence, {}))), shape, 60)
    assert found.fits, sentence
    assert found.load.sharded
    many = {"tokens_per_micro_batch": 1 << 20, "prompts_per_step": 8192}
    short = {"method": {"max_new_tokens": 1024}, "train": many | {"sharding": "fsdp2"}}
    smaller = plan_of(valid(merged(values, short)), shape, 60).changes
    assert any("tokens_per_micro_batch" in one for one in smaller)
    assert not any("context_parallel" in one for one in smaller)


def test_the_plan_knows_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(job_file(tmp_path, *GROUPS, "context_parallel = 4"))
    main(["plan", file])
    head = capsys.readouterr().out.splitlines()[0]
    assert "on 8 GPUs, FSDP2 with context parallelism in groups of 4;" in head
    assert main(["plan", file, "--set", "train.context_parallel=8"]) == 2
    assert "train.context_parallel: 8 processes cannot share" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text()) == QWEN_7B
