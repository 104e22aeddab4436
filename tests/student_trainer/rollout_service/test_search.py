"""Conversations at real rollout services: the bits of those that the trainer's process samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clients.config.tables.environment import SearchConfig
from student_trainer.data.rollout import Rollout, TailDraws
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import EngineSearch
from student_trainer.rollout_client.order import SamplingSettings, WeightsVersion
from student_trainer.rollouts.sampler import Sampler
from student_trainer.rollouts.search import SearchConversations, SearchRollouts
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import StartService
from tests.student_trainer.rollout_service.material import snapshot
from tests.student_trainer.rollouts.asking import PROMPTS, WORDS, Facts, asking_student

NEW, SEED = 200, 3
# Of batches: about four conversations, all of them.
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
        WORDS, Facts(fails="7"), config, max_new_tokens=NEW, batch_tokens=batch_tokens
    )


def at_engine(
    client: EngineClient, version: WeightsVersion, batch_tokens: int | None
) -> EngineSearch:
    settings = SamplingSettings(
        top_k=4, temperature=1.0, draws=3, seed=SEED, stream_tokens=NEW, batch_tokens=1
    )
    return EngineSearch(client, settings, lambda: version, conversations(batch_tokens))


def in_process(
    student: Any, numbers: Sequence[int], batch_tokens: int, *, greedy: bool = False
) -> list[Rollout]:
    sampler = Sampler(student, WORDS, top_k=4, temperature=1.0, draws=3)
    rollouts = SearchRollouts(conversations(batch_tokens), sampler, WORDS, stream_tokens=NEW)
    return listed(rollouts, numbers, greedy)


def listed(rollouts: Any, numbers: Sequence[int], greedy: bool = False) -> list[Rollout]:
    prompts = [PROMPTS[number % 2] for number in numbers]
    batches = rollouts.generate(prompts, numbers, seed=SEED, greedy=greedy)
    return [one for batch in batches for one in batch]


def assert_same_bits(found: Rollout, expected: Rollout, number: int) -> None:
    for field in fields(Rollout):
        mine, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "versions":
            assert {version for version, _ in mine} == {number}
            assert sum(tokens for _, tokens in mine) == found.learned
        elif isinstance(other, TailDraws):
            assert torch.equal(mine.ids, other.ids)
            assert torch.equal(mine.logprobs, other.logprobs)
        elif isinstance(other, Tensor):
            assert torch.equal(mine, other), field.name
        else:
            assert mine == other, field.name


@pytest.fixture
def version(student: Any, tmp_path: Path) -> WeightsVersion:
    return WeightsVersion("run.1", 5, snapshot(tmp_path, 5, student))


@pytest.mark.parametrize("batch_tokens", BATCHES)
@pytest.mark.parametrize("greedy", [False, True])
def test_the_bits_of_the_trainers_process(
    student: Any,
    start_service: StartService,
    version: WeightsVersion,
    batch_tokens: int,
    greedy: bool,
) -> None:
    expected = in_process(student, range(40), batch_tokens, greedy=greedy)
    with EngineClient([start_service().address]) as client:
        found = listed(at_engine(client, version, batch_tokens), range(40), greedy)
    if not greedy:
        assert {one.queries for one in expected} == {0, 1, 2}
        assert {one.truncated for one in expected} == {True, False}
    for mine, other in zip(found, expected, strict=True):
        assert_same_bits(mine, other, 5)


def test_rollouts_come_as_they_end(
    student: Any, start_service: StartService, version: WeightsVersion
) -> None:
    """Those without a query first; nothing is lost, whatever service sampled it."""
    expected = in_process(student, range(40), 100_000)
    addresses = [start_service().address for _ in range(2)]
    with EngineClient(addresses) as client:
        search = at_engine(client, version, None)
        prompts = [PROMPTS[number % 2] for number in range(40)]
        found = list(search.order(prompts, range(40), lambda: version))
    turns = [one.queries for _, one in found]
    assert turns[0] == 0
    assert max(turns[-3:]) == 2
    # Two batches of half the size round otherwise; a random number hardly lies on a boundary.
    same = sum(torch.equal(one.token_ids, expected[i].token_ids) for i, one in found)
    assert sorted(index for index, _ in found) == list(range(40))
    assert same >= 39


def test_a_turn_takes_the_weights_of_its_moment(
    student: Any, start_service: StartService, version: WeightsVersion, tmp_path: Path
) -> None:
    """With in_flight = "keep" or "recompute", the second turn has newer weights."""
    newer = WeightsVersion("run.1", 6, snapshot(tmp_path, 6, student))
    with EngineClient([start_service().address]) as client:
        search = at_engine(client, version, None)
        weights = iter([version, newer, newer])
        prompts = [PROMPTS[number % 2] for number in range(40)]
        found = list(search.order(prompts, range(40), lambda: next(weights)))
    asked = [one for _, one in found if one.queries]
    assert asked
    for one in asked:
        if not one.failed and len(one.versions) > 1:
            assert [number for number, _ in one.versions][:2] == [5, 6]
    assert any(len(one.versions) > 1 for one in asked)
