"""How sequences share lines, and when their rows arrive, changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from clients.runs.directory import RunDirectory
from protos.rows.codec import RowBlock
from student_trainer.data.packing import Layout, micro_batches, place_sequences
from student_trainer.data.rollout import Rollout
from student_trainer.loop.trainer import Trainer
from student_trainer.teachers.source import PendingRows
from tests.student_trainer import tiny
from tests.student_trainer.methods.test_on_policy import trainer as on_policy_trainer
from tests.student_trainer.methods.test_rl import HOT, assert_near, gradient_of, trainer_of

MOST = 100
LONG = {
    "train__tokens_per_micro_batch": MOST,
    "train__prompts_per_step": 16,
    "method__max_new_tokens": 20,
}


def assert_shared(items: Sequence[PendingRows]) -> None:
    """Several micro-batches, with sequences that share lines."""
    groups = micro_batches(items, MOST, "lines")
    lines = [
        place_sequences([len(one.sequence.token_ids) for one in group], "lines") for group in groups
    ]
    assert len(groups) > 1
    assert any(first > 0 for _, placed in lines for _, first in placed)


def ragged(pending: Sequence[PendingRows]) -> list[PendingRows]:
    """The same sequences, cut to different lengths: a random student hardly ever ends."""
    found = []
    for number, item in enumerate(pending):
        length = 1 + number % len(item.sequence.completion)
        rows: Future[RowBlock] = Future()
        rows.set_result(item.rows.result().slice(0, length))
        cut = cut_to(cast(Rollout, item.sequence), length)
        found.append(replace(item, sequence=cut, rows=rows))
    return found


def cut_to(one: Rollout, length: int) -> Rollout:
    return replace(
        one,
        token_ids=one.token_ids[: one.start + length],
        head_ids=one.head_ids[:length],
        token_logprobs=one.token_logprobs[:length],
        draws=None if one.draws is None else one.draws[:length],
    )


def learned(
    made: Trainer, pending: list[Any], layout: Layout
) -> tuple[dict[str, float], dict[str, Tensor]]:
    made._student.trained.layout = layout
    means, _ = made._learn(pending)
    return means, gradient_of(made)


def assert_equal_means(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("draws", [0, 3])
def test_on_policy(material: tiny.Material, tmp_path: Path, draws: int) -> None:
    tail = {"method__tail": "bucket+draws", "teacher__tail_draws": 3} if draws else {}
    changes: dict[str, Any] = {**LONG, **tail}
    if not draws:
        changes["method__tail"] = "bucket+sampled"
    run = RunDirectory.create(tmp_path / "run", tiny.job(material, **changes))
    made, _, _ = on_policy_trainer(material, run)
    pending = ragged(list(made._steps(1).updates[0]))
    assert_shared(pending)
    padded, expected = learned(made, pending, "padded")
    packed, found = learned(made, pending, "lines")
    assert_near(found, expected, 1e-6)
    assert_equal_means(packed, padded)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method__ratio": "sequence", "method__aggregate": "seq-mean-token-mean"},
        {"method__advantages": "gae"},
        {"method__kl_in": "reward"},
        {"method__top_k": 0, "method__estimator": "k3"},
        {"anchor__context": "{answer}="},
    ],
    ids=["grpo", "gspo", "critic", "kl as reward", "k3", "privileged anchor"],
)
def test_rl(material: tiny.Material, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The rows of the anchor, p_old and the critic's advantages are those of padded batches too."""
    config = tiny.rl_job(material, method__temperature=HOT, **LONG, **changes)
    steps: dict[Layout, list[Any]] = {}
    grads: dict[Layout, Any] = {}
    for layout in cast(list[Layout], ["padded", "lines"]):
        with trainer_of(tmp_path / layout, config) as made:
            assert made._student.full.layout == "lines"  # what the probe found
            made._student.full.layout = layout
            made._train_step(1)
            answers = cast(Any, made._steps).__self__._answers
            answers._rollouts = Ragged(answers._rollouts)
            one, two = made._steps(2).updates
            steps[layout] = [*one, *two]
            grads[layout] = learned(made, list(one), layout), learned(made, list(two), layout)
            for update in (one, two):
                means, expected = learned(made, list(update), "padded")
                packed, found = learned(made, list(update), "lines")
                assert_near(found, expected, 1e-6)
                assert_equal_means(packed, means)
    assert_shared(steps["lines"])
    for padded, packed in zip(steps["padded"], steps["lines"], strict=True):
        assert torch.equal(padded.sequence.token_ids, packed.sequence.token_ids)
        assert torch.allclose(padded.advantage, packed.advantage, rtol=1e-5, atol=1e-5)
        assert (padded.old_logprobs is None) == (packed.old_logprobs is None)
        if padded.old_logprobs is not None:
            assert torch.allclose(padded.old_logprobs, packed.old_logprobs, rtol=0, atol=1e-5)
        rows = zip((padded.wait().rows,), (packed.wait().rows,), strict=True)
        for one, other in rows:
            assert abs(one.head_logprobs - other.head_logprobs).max(initial=0) < 1e-5
            assert abs(one.tail_logmass - other.tail_logmass).max() < 1e-4
    for (padded, expected), (packed, found) in zip(grads["padded"], grads["lines"], strict=True):
        assert_near(found, expected, 1e-4)
        assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-5)


class Ragged:
    """Rollouts cut to different lengths."""

    in_process = True

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts

    def generate(self, *asked: Any, **options: Any) -> Any:
        for batch in self._rollouts.generate(*asked, **options):
            yield [cut_to(one, 1 + n % len(one.completion)) for n, one in enumerate(batch)]


def test_the_order_of_micro_batches_is_that_of_the_requests(
    material: tiny.Material, tmp_path: Path
) -> None:
    """Rows that arrive in another order give the same bits; and the first forward pass does not
    wait for the last rows.
    """
    config = tiny.job(material, **LONG)
    run = RunDirectory.create(tmp_path / "run", config)
    made, student, _ = on_policy_trainer(material, run)
    student.layout = "lines"
    pending = ragged(list(made._steps(1).updates[0]))
    expected = learned(made, pending, "lines")
    groups = micro_batches(pending, MOST, "lines")
    order = {id(item): number for number, item in enumerate(pending)}
    places = [sorted(order[id(item)] for item in group) for group in groups]
    assert [place for group in places for place in group] == list(range(len(pending)))
    assert len(groups) > 2

    late: list[Future[RowBlock]] = [Future() for _ in pending]
    waiting = [replace(item, rows=rows) for item, rows in zip(pending, late, strict=True)]
    forward, count = student.forward, 0

    def answer(group: list[int]) -> None:
        for number in reversed(group):
            late[number].set_result(pending[number].rows.result())

    def answering(*inputs: Any) -> Any:
        """Only a forward pass of one group makes the rows of the next one arrive."""
        nonlocal count
        count += 1
        if count < len(places):
            answer(places[count])
        return forward(*inputs)

    student.forward = answering  # type: ignore[method-assign]
    answer(places[0])
    with ThreadPoolExecutor(1) as pool:  # a wait for later rows would never end
        learn = pool.submit(made._learn, waiting)
        try:
            means, _ = learn.result(timeout=60)
        finally:
            for number, future in enumerate(late):
                if not future.done():
                    future.set_result(pending[number].rows.result())
    assert means == expected[0]
    found = gradient_of(made)
    assert all(torch.equal(found[name], grad) for name, grad in expected[1].items())
