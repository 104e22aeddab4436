"""The table `rollouts`: which program samples, and which combinations are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from clients.config.kinds import parse_job
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.tables.rollouts import RolloutsConfig


def make_on_policy_job(**rollouts: object) -> OnPolicyJob:
    return OnPolicyJob.model_validate(
        {"student": {"model": "s"}, "data": {"path": "d.jsonl"}, "rollouts": rollouts}
    )


def make_rl_job(**tables: object) -> RLJob:
    job = {"student": {"model": "s"}, "method": {"type": "rl"}, "reward": {"type": "math"}}
    return RLJob.model_validate({**job, "data": {"path": "d.jsonl"}, **tables})


@pytest.mark.parametrize(
    ("table", "in_trainer", "replicas"),
    [
        ({}, True, 0),
        ({"lag": 1}, False, 1),
        ({"engine": "vllm"}, False, 1),
        ({"address": "host:1"}, False, 0),
        ({"engine": "vllm", "gpus": 4}, False, 4),
        ({"engine": "vllm", "gpus": 4, "tensor_parallel_size": 2}, False, 2),
    ],
)
def test_who_samples(table: dict[str, object], in_trainer: bool, replicas: int) -> None:
    rollouts = RolloutsConfig.model_validate(table)
    assert (rollouts.in_trainer, rollouts.replicas) == (in_trainer, replicas)


def test_engines_have_gpus_of_their_own() -> None:
    job = make_on_policy_job(engine="vllm", gpus=3)
    assert job.gpus == 1 + 3
    assert make_on_policy_job(engine="vllm").gpus == 1, "it shares the trainer's"
    assert parse_job(job.model_dump_json()).gpus == 4


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"lag": 1, "in_flight": "keep"}, "needs rollouts.engine = 'vllm'"),
        ({"engine": "vllm", "gpus": 3, "tensor_parallel_size": 2}, "rollouts.gpus = 3"),
        (
            {"lag": 1, "push": "broadcast"},
            "only 'file' is supported; remove rollouts.push",
        ),
        ({"engine": "vllm", "push": "ipc"}, "remove rollouts.push"),
        ({"lag": 1, "push": "nccl"}, "Input should be 'file'"),
        ({"engine": "vllm", "tensor_parallel_size": 2}, "raise rollouts.gpus"),
    ],
)
def test_refused_alone(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        make_on_policy_job(**table)


def test_later_prompts_must_be_known() -> None:
    method = {"type": "rl", "dynamic_sampling": 2}
    with pytest.raises(ValidationError, match="set lag = 0, or remove dynamic_sampling"):
        make_rl_job(method=method, rollouts={"lag": 1})
    assert make_rl_job(method=method, rollouts={"engine": "vllm"}).rollouts.lag == 0


def test_an_engine_samples_with_an_environment() -> None:
    assert (
        make_rl_job(environment={"retriever": "passages.jsonl"}, rollouts={"lag": 1}).rollouts.lag
        == 1
    )
