"""Conversations sampled by real rollout services equal those of the trainer's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.config.tables.environment import SearchConfig
from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import EngineSearch
from student_trainer.rollout_client.order import SamplingSettings, WeightsVersion
from student_trainer.rollouts.sampler import Sampler
from student_trainer.rollouts.search import SearchConversations, SearchRollouts
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.material import snapshot
from tests.student_trainer.rollouts.asking import PROMPTS, WORDS, Facts, asking_student

MAX_NEW_TOKENS, SEED = 200, 3
# Tokens of a batch: about four conversations, or all of them.
BATCHES = [900, 100_000]


@pytest.fixture(scope="module")
def student() -> Any:
    return asking_student()


@pytest.fixture(scope="module")
def student_path(student: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(student, WORDS, tmp_path_factory.mktemp("asking"))


def conversations(batch_tokens: int | None) -> SearchConversations:
    config = SearchConfig(retriever="corpus.jsonl", max_turns=2)
    return SearchConversations(
        WORDS, Facts(fails="7"), config, max_new_tokens=MAX_NEW_TOKENS, batch_tokens=batch_tokens
    )


def search_at_engine(
    client: EngineClient, version: WeightsVersion, batch_tokens: int | None
) -> EngineSearch:
    settings = SamplingSettings(
        top_k=4, temperature=1.0, draws=3, seed=SEED, stream_tokens=MAX_NEW_TOKENS, batch_tokens=1
    )
    return EngineSearch(client, settings, lambda: version, conversations(batch_tokens))


def sample_in_process(
    student: Any, numbers: Sequence[int], batch_tokens: int, *, greedy: bool = False
) -> list[Rollout]:
    sampler = Sampler(student, WORDS, top_k=4, temperature=1.0, draws=3)
    rollouts = SearchRollouts(
        conversations(batch_tokens), sampler, WORDS, stream_tokens=MAX_NEW_TOKENS
    )
    return generate_all(rollouts, numbers, greedy)


def generate_all(rollouts: Any, numbers: Sequence[int], greedy: bool = False) -> list[Rollout]:
    prompts = [PROMPTS[number % 2] for number in numbers]
    batches = rollouts.generate(prompts, numbers, seed=SEED, greedy=greedy)
    return [rollout for batch in batches for rollout in batch]


def assert_same_bits(actual: Rollout, expected: Rollout, number: int) -> None:
    for field in fields(Rollout):
        actual_value, expected_value = getattr(actual, field.name), getattr(expected, field.name)
        if field.name == "versions":
            assert {version for version, _ in actual_value} == {number}
            assert sum(tokens for _, tokens in actual_value) == actual.learned
        elif isinstance(expected_value, TailDraws):
            assert torch.equal(actual_value.ids, expected_value.ids)
            assert torch.equal(actual_value.logprobs, expected_value.logprobs)
        elif isinstance(expected_value, Tensor):
            assert torch.equal(actual_value, expected_value), field.name
        else:
            assert actual_value == expected_value, field.name


@pytest.fixture
def version(student: Any, tmp_path: Path) -> WeightsVersion:
    return WeightsVersion("run.1", 5, snapshot(tmp_path, 5, student))


@pytest.mark.parametrize("batch_tokens", BATCHES)
@pytest.mark.parametrize("greedy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_bits_of_the_trainers_process(
    student: Any,
    start_service: StartService,
    version: WeightsVersion,
    batch_tokens: int,
    greedy: bool,
) -> None:
    expected = sample_in_process(student, range(40), batch_tokens, greedy=greedy)
    with EngineClient([start_service().address]) as client:
        rollouts = generate_all(search_at_engine(client, version, batch_tokens), range(40), greedy)
    if not greedy:
        assert {rollout.queries for rollout in expected} == {0, 1, 2}
        assert {rollout.truncated for rollout in expected} == {True, False}
    for rollout, expected_rollout in zip(rollouts, expected, strict=True):
        assert_same_bits(rollout, expected_rollout, 5)


def test_rollouts_come_as_they_end(
    student: Any, start_service: StartService, version: WeightsVersion
) -> None:
    """Conversations without a query come first; none is lost with two services."""
    expected = sample_in_process(student, range(40), 100_000)
    addresses = [start_service().address for _ in range(2)]
    with EngineClient(addresses) as client:
        search = search_at_engine(client, version, None)
        prompts = [PROMPTS[number % 2] for number in range(40)]
        entries = list(search.order(prompts, range(40), lambda: version))
    turns = [rollout.queries for _, rollout in entries]
    assert turns[0] == 0
    assert max(turns[-3:]) == 2
    # Batches of half the size round differently, which hardly ever changes a sampled token.
    equal_count = sum(
        torch.equal(rollout.token_ids, expected[i].token_ids) for i, rollout in entries
    )
    assert sorted(index for index, _ in entries) == list(range(40))
    assert equal_count >= 39


def test_a_turn_takes_the_weights_of_its_moment(
    student: Any, start_service: StartService, version: WeightsVersion, tmp_path: Path
) -> None:
    """With in_flight = "keep" or "recompute", the second turn has newer weights."""
    newer_version = WeightsVersion("run.1", 6, snapshot(tmp_path, 6, student))
    with EngineClient([start_service().address]) as client:
        search = search_at_engine(client, version, None)
        weights = iter([version, newer_version, newer_version])
        prompts = [PROMPTS[number % 2] for number in range(40)]
        entries = list(search.order(prompts, range(40), lambda: next(weights)))
    rollouts = [rollout for _, rollout in entries if rollout.queries]
    assert rollouts
    for rollout in rollouts:
        if not rollout.failed and len(rollout.versions) > 1:
            assert [number for number, _ in rollout.versions][:2] == [5, 6]
    assert any(len(rollout.versions) > 1 for rollout in rollouts)
