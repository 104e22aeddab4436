"""The advice of a plan leads to valid jobs; a store is read once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from clients.config.kinds import AnyTraining, parse_job
from clients.config.tables.common import TrainingJob
from clients.data.model_shape import shape_of
from clients.preflight import memory_plan
from clients.preflight.files import check_processes
from clients.preflight.memory import resident_bytes, sampling_bytes
from clients.preflight.memory_plan import plan_of
from clients.store.dataset import LogitDataset
from clients.store.store import LogitStore
from tests.clients.preflight.test_memory import QWEN_7B
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


def valid(values: Values) -> AnyTraining:
    """Return the job as the command reads it."""
    job = parse_job(json.dumps(values))
    assert isinstance(job, TrainingJob)
    check_processes(job)
    return job


def merged(values: Values, more: Values) -> Values:
    tables = {
        key: merged(values.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in more.items()
    }
    return values | tables


def advised(sentence: str, before: Values) -> Values:
    """Return the keys of a sentence; "all of these together" are those of the ones `before`."""
    told = sentence.rsplit(":", 1)[0]
    if told.startswith("all of these together"):
        _, _, more = told.partition(", and ")
        return merged(before, tomllib.loads(more))
    if " GPUs with " in told:
        count, _, told = told.partition(" GPUs with ")
        return merged(tomllib.loads(told), {"train": {"processes": int(count)}})
    return tomllib.loads(told)


@pytest.mark.parametrize("method", JOBS)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_piece_of_advice_is_a_valid_job(method: str, processes: int) -> None:
    train = {"processes": processes, "tokens_per_micro_batch": 4096}
    own = {"student": {"model": "m", "dtype": "float32"}, "data": {"path": "p.jsonl"}}
    values = merged(merged(own, JOBS[method]), {"train": train})
    shape = shape_of(QWEN_7B)
    job, counts = valid(values), []
    for memory in (20, 30, 40, 60, 80, 120, 160, 240):
        together: Values = {}
        for sentence in plan_of(job, shape, memory).changes:
            change = advised(sentence, together)
            found = plan_of(valid(merged(values, change)), shape, memory)
            assert found.fits or not sentence.endswith(" fits"), (memory, sentence)
            counts += [found.load.processes] if " GPUs with " in sentence else []
            together = merged(together, change)
    assert max(counts) == 4, "the largest power of two up to 5, or 6"


def test_adapters_are_no_advice_for_groups_of_processes() -> None:
    own: Values = {"student": {"model": "m", "dtype": "float32"}, "data": {"path": "p.jsonl"}}
    train = {"processes": 4, "sharding": "fsdp2", "tensor_parallel": 2}
    values = merged(own, {"train": train})
    advice = plan_of(valid(values), shape_of(QWEN_7B), 20).changes
    assert "all of these together" in advice[-1]
    names = []
    for sentence in advice[:-1]:
        change = advised(sentence, {})
        valid(merged(values, change))
        names += change
    assert set(names) == {"student"}
    assert not any("lora" in sentence for sentence in advice)


def test_the_store_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(number, rows=number) for number in (40, 99, 7)])
    opened = []

    def counted(path: str) -> LogitDataset:
        opened.append(path)
        return LogitDataset(path)

    monkeypatch.setattr(memory_plan, "LogitDataset", counted)
    values = {"method": {"type": "offline"}, "student": {"model": "m"}}
    plan = plan_of(valid(values | {"data": {"path": str(tmp_path)}}), shape_of(QWEN_7B), 20)
    assert plan.changes
    assert opened == [str(tmp_path)]
    assert plan.longest == plan.load.line == 100


def test_an_engine_on_the_same_gpu_is_counted() -> None:
    """Beside the trainer all the time; asleep while it learns, only beside what that keeps."""
    student = {"model": "m", "gradient_checkpointing": True}
    own: Values = {"student": student, "data": {"path": "p.jsonl"}}
    shape, memory = shape_of(QWEN_7B), 240.0
    engine = round(0.4 * memory * memory_plan.GIB)

    def planned(**rollouts: object) -> memory_plan.MemoryPlan:
        return plan_of(valid(merged(own, {"rollouts": rollouts})), shape, memory)

    apart = planned(engine="vllm", gpus=1, lag=1)
    assert "sampling" not in apart.parts
    beside = planned(engine="vllm", lag=1)
    assert beside.peak == apart.peak + engine
    assert apart.fits
    assert not beside.fits
    kept = sum(resident_bytes(apart.load).values())
    asleep = planned(engine="vllm", lag=0)
    assert asleep.parts["sampling"]["rollout engine"] == engine
    assert "rollout engine" not in {n for n, of in asleep.parts["learning"].items() if of}
    scored = sum(asleep.parts["scoring"].values())
    assert scored > kept + engine
    assert asleep.peak == max(apart.peak, scored)
    assert planned(engine="vllm", lag=0, gpu_memory_share=0.2).fits


def test_an_hf_engine_on_the_same_gpu_has_all_weights() -> None:
    """It never sleeps: beside what the trainer needs for learning, what one process that samples
    itself holds of the weights and needs for sampling.
    """
    own: Values = {"student": {"model": "m"}, "data": {"path": "p.jsonl"}}
    shape, memory = shape_of(QWEN_7B), 240.0

    def planned(**rollouts: object) -> memory_plan.MemoryPlan:
        return plan_of(valid(merged(own, {"rollouts": rollouts})), shape, memory)

    alone, apart, beside = planned(), planned(engine="hf", gpus=1, lag=1), planned(lag=1)
    engine = resident_bytes(alone.load)["weights"] + sum(sampling_bytes(alone.load).values())
    assert engine > 4 * shape.weights
    assert beside.peak == apart.peak + engine
    assert not beside.load.engine_sleeps
