"""The changes that a plan advises are valid jobs; a store is opened once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyTraining, parse_job
from clients.config.tables.job import TrainingJob
from clients.data.models.shape import shape_of
from clients.plan import memory_plan
from clients.plan.memory import resident_bytes, sampling_bytes
from clients.plan.memory_plan import plan_of
from clients.preflight.files import check_processes
from clients.store.dataset import LogitDataset
from clients.store.store import LogitStore
from tests.clients.plan.test_memory import QWEN_7B
from tests.clients.store.test_store import META, entry

Values = dict[str, Any]
# Fewer held-out prompts than sequences of a step, and fewer prompts of an update than of a step.
JOBS: dict[str, Values] = {
    "on_policy": {"train": {"prompts_per_step": 32}, "eval": {"prompts": 6}},
    "rl": {
        "method": {"type": "rl", "rollouts_per_prompt": 8, "updates_per_step": 3},
        "reward": {"type": "exact_match"},
        "train": {"prompts_per_step": 16},
    },
    "sft": {"method": {"type": "sft"}, "train": {"prompts_per_step": 6}, "eval": {"prompts": 64}},
}


def valid_job(values: Values) -> AnyTraining:
    """Return the job as the command reads it."""
    job = parse_job(json.dumps(values))
    assert isinstance(job, TrainingJob)
    check_processes(job)
    return job


def merge_tables(values: Values, changes: Values) -> Values:
    tables = {
        key: merge_tables(values.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return values | tables


def advised_keys(sentence: str, earlier_keys: Values) -> Values:
    """Return the keys of a sentence; "all of these together" are `earlier_keys` and one more."""
    keys_text = sentence.rsplit(":", 1)[0]
    if keys_text.startswith("all of these together"):
        _, _, last_keys_text = keys_text.partition(", and ")
        return merge_tables(earlier_keys, tomllib.loads(last_keys_text))
    if " GPUs with " in keys_text:
        count, _, keys_text = keys_text.partition(" GPUs with ")
        return merge_tables(tomllib.loads(keys_text), {"train": {"processes": int(count)}})
    return tomllib.loads(keys_text)


@pytest.mark.parametrize("method", JOBS)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_piece_of_advice_is_a_valid_job(method: str, processes: int) -> None:
    train = {"processes": processes, "tokens_per_micro_batch": 4096}
    base_job = {"student": {"model": "m", "dtype": "float32"}, "data": {"path": "p.jsonl"}}
    values = merge_tables(merge_tables(base_job, JOBS[method]), {"train": train})
    shape = shape_of(QWEN_7B)
    job, counts = valid_job(values), []
    for memory in (20, 30, 40, 60, 80, 120, 160, 240):
        all_changes: Values = {}
        for sentence in plan_of(job, shape, memory).changes:
            change = advised_keys(sentence, all_changes)
            advised_plan = plan_of(valid_job(merge_tables(values, change)), shape, memory)
            assert advised_plan.fits or not sentence.endswith(" fits"), (memory, sentence)
            counts += [advised_plan.load.processes] if " GPUs with " in sentence else []
            all_changes = merge_tables(all_changes, change)
    assert max(counts) == 4, "the largest power of two up to 5, or 6"


def test_adapters_are_no_advice_for_groups_of_processes() -> None:
    base_job: Values = {"student": {"model": "m", "dtype": "float32"}, "data": {"path": "p.jsonl"}}
    train = {"processes": 4, "sharding": "fsdp2", "tensor_parallel": 2}
    values = merge_tables(base_job, {"train": train})
    advice = plan_of(valid_job(values), shape_of(QWEN_7B), 20).changes
    assert "all of these together" in advice[-1]
    names = []
    for sentence in advice[:-1]:
        change = advised_keys(sentence, {})
        valid_job(merge_tables(values, change))
        names += change
    assert set(names) == {"student"}
    assert not any("lora" in sentence for sentence in advice)


def test_the_store_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = META | {"vocab_size": "100", "top_k": "4", "tail_samples": "0"}
    with LogitStore(tmp_path, write=True, metadata=metadata) as store:
        store.append([entry(number, rows=number) for number in (40, 99, 7)])
    opened_paths = []

    def open_dataset(path: str) -> LogitDataset:
        opened_paths.append(path)
        return LogitDataset(path)

    monkeypatch.setattr("clients.preflight.limits.LogitDataset", open_dataset)
    values = {"method": {"type": "offline"}, "student": {"model": "m"}}
    plan = plan_of(valid_job(values | {"data": {"path": str(tmp_path)}}), shape_of(QWEN_7B), 20)
    assert plan.changes
    assert opened_paths == [str(tmp_path)]
    assert plan.longest == plan.load.line == 100


def test_an_engine_on_the_same_gpu_is_counted() -> None:
    """An engine that never sleeps adds its memory to the peak; one that sleeps during learning adds
    it only to what the trainer keeps resident.
    """
    student = {"model": "m", "gradient_checkpointing": True}
    base_job: Values = {"student": student, "data": {"path": "p.jsonl"}}
    shape, memory = shape_of(QWEN_7B), 240.0
    engine_bytes = round(0.4 * memory * memory_plan.GIB)

    def plan_with(**rollouts: object) -> memory_plan.MemoryPlan:
        return plan_of(valid_job(merge_tables(base_job, {"rollouts": rollouts})), shape, memory)

    separate_plan = plan_with(engine="vllm", gpus=1, lag=1)
    assert "sampling" not in separate_plan.parts
    shared_plan = plan_with(engine="vllm", lag=1)
    assert shared_plan.peak == separate_plan.peak + engine_bytes
    assert separate_plan.fits
    assert not shared_plan.fits
    kept_bytes = sum(resident_bytes(separate_plan.load).values())
    sleeping_plan = plan_with(engine="vllm", lag=0)
    assert sleeping_plan.parts["sampling"]["rollout engine"] == engine_bytes
    assert "rollout engine" not in {
        name for name, part_bytes in sleeping_plan.parts["learning"].items() if part_bytes
    }
    scoring_total = sum(sleeping_plan.parts["scoring"].values())
    assert scoring_total > kept_bytes + engine_bytes
    assert sleeping_plan.peak == max(separate_plan.peak, scoring_total)
    assert plan_with(engine="vllm", lag=0, gpu_memory_share=0.2).fits


def test_an_hf_engine_on_the_same_gpu_has_all_weights() -> None:
    """It never sleeps: it adds the weights and the sampling memory of a trainer that samples by
    itself.
    """
    base_job: Values = {"student": {"model": "m"}, "data": {"path": "p.jsonl"}}
    shape, memory = shape_of(QWEN_7B), 240.0

    def plan_with(**rollouts: object) -> memory_plan.MemoryPlan:
        return plan_of(valid_job(merge_tables(base_job, {"rollouts": rollouts})), shape, memory)

    trainer_plan, separate_plan, shared_plan = (
        plan_with(),
        plan_with(engine="hf", gpus=1, lag=1),
        plan_with(lag=1),
    )
    engine_bytes = resident_bytes(trainer_plan.load)["weights"] + sum(
        sampling_bytes(trainer_plan.load).values()
    )
    assert engine_bytes > 4 * shape.weights
    assert shared_plan.peak == separate_plan.peak + engine_bytes
    assert not shared_plan.load.engine_sleeps
