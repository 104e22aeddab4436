"""The layout of sequences, and the order in which rows arrive, change only rounding."""

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
from student_trainer.data.sequence import Rollout
from student_trainer.loop.trainer import Trainer
from student_trainer.teachers.source import PendingRows
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.test_on_policy import make_trainer as on_policy_trainer
from tests.student_trainer.methods.test_rl import HOT, assert_near, gradient_of, trainer_of

MAX_TOKENS = 100
LONG = {
    "train__tokens_per_micro_batch": MAX_TOKENS,
    "train__prompts_per_step": 16,
    "method__max_new_tokens": 20,
}


def assert_shared(items: Sequence[PendingRows]) -> None:
    """Check that there are several micro-batches, with sequences that share lines."""
    groups = micro_batches(items, MAX_TOKENS, "lines")
    lines = [
        place_sequences([len(item.sequence.token_ids) for item in group], "lines")
        for group in groups
    ]
    assert len(groups) > 1
    assert any(first > 0 for _, placed in lines for _, first in placed)


def cut_to_lengths(pending: Sequence[PendingRows]) -> list[PendingRows]:
    """Return the sequences cut to different lengths, as a random student hardly ever ends."""
    cut_items = []
    for number, item in enumerate(pending):
        length = 1 + number % len(item.sequence.completion)
        rows: Future[RowBlock] = Future()
        rows.set_result(item.rows.result().slice(0, length))
        cut_rollout = cut_to(cast(Rollout, item.sequence), length)
        cut_items.append(replace(item, sequence=cut_rollout, rows=rows))
    return cut_items


def cut_to(rollout: Rollout, length: int) -> Rollout:
    return replace(
        rollout,
        token_ids=rollout.token_ids[: rollout.start + length],
        head_ids=rollout.head_ids[:length],
        token_logprobs=rollout.token_logprobs[:length],
        draws=None if rollout.draws is None else rollout.draws[:length],
    )


def learn_update(
    trainer: Trainer, pending: list[Any], layout: Layout
) -> tuple[dict[str, float], dict[str, Tensor]]:
    trainer.student.trained.layout = layout
    means = add_gradients(trainer, pending)
    return means, gradient_of(trainer)


def assert_equal_means(means: dict[str, float], expected: dict[str, float]) -> None:
    assert means.keys() == expected.keys()
    for name, value in expected.items():
        assert means[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("draws", [0, 3])
def test_on_policy(material: tiny.Material, tmp_path: Path, draws: int) -> None:
    tail = {"method__tail": "bucket+draws", "teacher__tail_draws": 3} if draws else {}
    changes: dict[str, Any] = {**LONG, **tail}
    if not draws:
        changes["method__tail"] = "bucket+sampled"
    run = RunDirectory.create(tmp_path / "run", tiny.job(material, **changes))
    trainer, _, _ = on_policy_trainer(material, run)
    pending = cut_to_lengths(list(trainer.method.steps(1).updates[0]))
    assert_shared(pending)
    padded_means, expected = learn_update(trainer, pending, "padded")
    packed_means, gradients = learn_update(trainer, pending, "lines")
    assert_near(gradients, expected, 1e-6)
    assert_equal_means(packed_means, padded_means)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"method__ratio": "sequence", "method__aggregate": "seq-mean-token-mean"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"method__advantages": "gae"}, marks=pytest.mark.slow),
        pytest.param({"method__kl_in": "reward"}, marks=pytest.mark.slow),
        pytest.param({"method__top_k": 0, "method__estimator": "k3"}, marks=pytest.mark.slow),
        pytest.param({"anchor__context": "{answer}="}, marks=pytest.mark.slow),
    ],
    ids=["grpo", "gspo", "critic", "kl as reward", "k3", "privileged anchor"],
)
def test_rl(material: tiny.Material, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Rows of the anchor, p_old and the critic's advantages equal those of padded batches."""
    config = tiny.rl_job(material, method__temperature=HOT, **LONG, **changes)
    steps: dict[Layout, list[Any]] = {}
    grads: dict[Layout, Any] = {}
    for layout in cast(list[Layout], ["padded", "lines"]):
        with trainer_of(tmp_path / layout, config) as trainer:
            assert trainer.student.full.layout == "lines"  # found by the probe
            trainer.student.full.layout = layout
            trainer._train_step(1)
            answers = cast(Any, trainer.method.steps).__self__._answers
            answers._rollouts = Ragged(answers._rollouts)
            first_update, second_update = trainer.method.steps(2).updates
            steps[layout] = [*first_update, *second_update]
            grads[layout] = (
                learn_update(trainer, list(first_update), layout),
                learn_update(trainer, list(second_update), layout),
            )
            for update in (first_update, second_update):
                means, expected = learn_update(trainer, list(update), "padded")
                packed_means, gradients = learn_update(trainer, list(update), "lines")
                assert_near(gradients, expected, 1e-6)
                assert_equal_means(packed_means, means)
    assert_shared(steps["lines"])
    for padded_item, packed_item in zip(steps["padded"], steps["lines"], strict=True):
        assert torch.equal(padded_item.sequence.token_ids, packed_item.sequence.token_ids)
        assert torch.allclose(padded_item.advantage, packed_item.advantage, rtol=1e-5, atol=1e-5)
        assert (padded_item.old_logprobs is None) == (packed_item.old_logprobs is None)
        if padded_item.old_logprobs is not None:
            assert torch.allclose(
                padded_item.old_logprobs, packed_item.old_logprobs, rtol=0, atol=1e-5
            )
        rows = zip((padded_item.wait().rows,), (packed_item.wait().rows,), strict=True)
        for padded_rows, packed_rows in rows:
            assert abs(padded_rows.head_logprobs - packed_rows.head_logprobs).max(initial=0) < 1e-5
            assert abs(padded_rows.tail_logmass - packed_rows.tail_logmass).max() < 1e-4
    for (padded_means, expected), (packed_means, gradients) in zip(
        grads["padded"], grads["lines"], strict=True
    ):
        assert_near(gradients, expected, 1e-4)
        assert packed_means["loss"] == pytest.approx(padded_means["loss"], abs=1e-5)


class Ragged:
    """Rollouts cut to different lengths."""

    in_process = True

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts

    def generate(self, *arguments: Any, **options: Any) -> Any:
        for batch in self._rollouts.generate(*arguments, **options):
            yield [
                cut_to(rollout, 1 + n % len(rollout.completion)) for n, rollout in enumerate(batch)
            ]


def test_the_order_of_micro_batches_is_that_of_the_requests(
    material: tiny.Material, tmp_path: Path
) -> None:
    """Rows that arrive in another order give the same bits, and the first forward pass does not
    wait for the last rows.
    """
    config = tiny.job(material, **LONG)
    run = RunDirectory.create(tmp_path / "run", config)
    trainer, student, _ = on_policy_trainer(material, run)
    student.layout = "lines"
    pending = cut_to_lengths(list(trainer.method.steps(1).updates[0]))
    expected = learn_update(trainer, pending, "lines")
    groups = micro_batches(pending, MAX_TOKENS, "lines")
    order = {id(item): number for number, item in enumerate(pending)}
    places = [sorted(order[id(item)] for item in group) for group in groups]
    assert [place for group in places for place in group] == list(range(len(pending)))
    assert len(groups) > 2

    late_rows: list[Future[RowBlock]] = [Future() for _ in pending]
    waiting_items = [
        replace(item, rows=rows) for item, rows in zip(pending, late_rows, strict=True)
    ]
    forward, count = student.forward, 0

    def answer(group: list[int]) -> None:
        for number in reversed(group):
            late_rows[number].set_result(pending[number].rows.result())

    def answer_and_forward(*inputs: Any) -> Any:
        """Deliver the rows of the next group when the forward pass of one group starts."""
        nonlocal count
        count += 1
        if count < len(places):
            answer(places[count])
        return forward(*inputs)

    student.forward = answer_and_forward  # type: ignore[method-assign]
    answer(places[0])
    with ThreadPoolExecutor(1) as pool:  # waiting for later rows would hang
        learn = pool.submit(add_gradients, trainer, waiting_items)
        try:
            means = learn.result(timeout=60)
        finally:
            for number, future in enumerate(late_rows):
                if not future.done():
                    future.set_result(pending[number].rows.result())
    assert means == expected[0]
    gradients = gradient_of(trainer)
    assert all(torch.equal(gradients[name], grad) for name, grad in expected[1].items())
