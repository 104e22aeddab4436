"""Learning from rewards in the whole trainer: the gradient, and the tokens in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from clients.config.rl import RLJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from protos.errors import InvalidInput
from student_trainer.assembly import assemble
from student_trainer.data.sequence import Rollout
from student_trainer.loop.trainer import Trainer
from student_trainer.losses import exact_kl
from student_trainer.methods.rl import PendingRLSequence
from student_trainer.rewards import make_rewards
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.run import metrics
from student_trainer.teachers.source import PendingRows
from tests.end_to_end.processes import metrics_of
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.model_teacher import completion_logprobs

VOCABULARY = len(tiny.ALPHABET) + 1
HOT = 3.0  # a random student prefers one token, and rewards need different answers


@contextmanager
def trainer_of(path: Path, config: RLJob) -> Iterator[Trainer]:
    run = RunDirectory.create(path, config)
    progress = Progress(run, attempt=1, max_steps=9, main=True, terminated=lambda: False)
    with nullcontext() if config.reward is None else make_rewards(config.reward) as rewards:
        trainer = assemble(config, run, {}, progress, 1, None, rewards)
        try:
            yield trainer
        finally:
            assert trainer.metrics is not None
            trainer.metrics.close()


class ForeignTokens:
    """Rollouts that mark every third token as written by an environment."""

    in_process = True

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def generate(self, *arguments: Any, **options: Any) -> Iterator[list[Rollout]]:
        for batch in self._rollouts.generate(*arguments, **options):
            yield [
                replace(rollout, own=torch.arange(len(rollout.completion)) % 3 != 1)
                for rollout in batch
            ]


def write_with_foreign_tokens(trainer: Trainer) -> None:
    answers = cast(Any, trainer.method.steps).__self__._answers
    answers._rollouts = ForeignTokens(answers._rollouts)


def gradient_of(trainer: Trainer) -> dict[str, Tensor]:
    model = trainer.student.trained.model
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def assert_near(
    gradients: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    assert gradients.keys() == expected.keys()
    for name, grad in expected.items():
        assert float((gradients[name] - grad).norm() / grad.norm()) < tolerance, name


def run_plain_passes(
    trainer: Trainer, items: Sequence[PendingRows]
) -> Iterator[tuple[PendingRLSequence, Tensor, Tensor, Tensor]]:
    """Yield (item, log p [T, V], log q [T, V] of the anchor, log p/mu [T]) in float64."""
    model = trainer.student.trained.model
    assert trainer.method.anchor is not None
    pending = [cast(PendingRLSequence, item) for item in items]
    rollouts = [cast(Rollout, item.sequence) for item in pending]
    # All items first: in_student_place() swaps weights, which an autograd graph must not span.
    with trainer.method.anchor.in_student_place():
        anchor_logprobs = [completion_logprobs(model, rollout, HOT) for rollout in rollouts]
    for item, rollout, log_q in zip(pending, rollouts, anchor_logprobs, strict=True):
        logits = model(input_ids=rollout.token_ids[None]).logits[0, rollout.start - 1 : -1]
        log_p = (logits.double() / HOT).log_softmax(1)
        token = log_p.gather(1, rollout.completion[:, None])[:, 0]
        yield item, log_p, log_q, token - rollout.token_logprobs.double()


def expected_gradient(
    trainer: Trainer, items: Sequence[PendingRows], beta: float, by_sequence: bool
) -> dict[str, Tensor]:
    """Return the gradient of GRPO's loss and the exact KL, from an independent implementation."""
    losses = []
    for item, log_p, log_q, log_ratio in run_plain_passes(trainer, items):
        rollout = cast(Rollout, item.sequence)
        is_own = (
            torch.ones(len(log_ratio), dtype=torch.bool) if rollout.own is None else rollout.own
        )
        ratio = log_ratio[is_own].mean().exp() if by_sequence else log_ratio.exp()
        clipped_ratio = ratio.clamp(0.8, 1.28)
        loss = -torch.minimum(ratio * item.advantage, clipped_ratio * item.advantage)
        loss = loss + beta * exact_kl(log_p, log_q, direction="reverse")
        losses.append(loss[is_own])
    if trainer.config.method.aggregate == "token-mean":
        torch.cat(losses).mean().backward()
    else:
        torch.stack([loss.mean() for loss in losses]).mean().backward()
    return gradient_of(trainer)


@pytest.mark.parametrize(
    ("foreign", "changes"),
    [
        (False, {}),
        (True, {}),
        (True, {"method__aggregate": "seq-mean-token-mean", "train__tokens_per_micro_batch": 1}),
        (True, {"method__ratio": "sequence"}),
        (False, {"method__advantages": "group_mean", "train__tokens_per_micro_batch": 10_000}),
    ],
)
def test_the_gradient_is_that_of_the_formula(
    material: tiny.Material, tmp_path: Path, foreign: bool, changes: dict[str, Any]
) -> None:
    """With k = |V|, in the second update of a step: the policy differs from the sampling policy and
    from the anchor. Foreign tokens have no gradient.
    """
    config = tiny.rl_job(
        material,
        method__top_k=VOCABULARY,
        method__temperature=HOT,
        anchor={"tau": 1.0},
        train__learning_rate=0.05,
        **changes,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        if foreign:
            write_with_foreign_tokens(trainer)
        trainer._train_step(1)
        first, second = trainer.method.steps(2).updates
        trainer.learner.learn(1, first, 0.01)
        means = add_gradients(trainer, second)
        gradients = gradient_of(trainer)
        by_sequence = config.method.ratio == "sequence"
        expected = expected_gradient(trainer, second, config.method.beta, by_sequence)
        assert_near(gradients, expected, 2e-3)
        assert means["tokens"] == sum(item.sequence.learned for item in second)
        assert any(cast(PendingRLSequence, item).advantage for item in second)
        # The test is not trivial: some tokens are clipped, and the anchor is not the student.
        assert by_sequence or 0 < means["ratio/clipped"] < 1
        assert means["kl/anchor"] > 1e-3


def test_updates_take_the_steps_prompts_in_turn(material: tiny.Material, tmp_path: Path) -> None:
    """As in PPO, the policy before the first update of a step samples all its rollouts."""
    ids_by_run = []
    for updates in (1, 2):
        config = tiny.rl_job(material, method__updates_per_step=updates, method__temperature=HOT)
        with trainer_of(tmp_path / str(updates), config) as trainer:
            step = trainer.method.steps(1)
            ids_by_run.append(
                [item.sequence.token_ids.tolist() for u in step.updates for item in u]
            )
            assert [len(update) for update in step.updates] == [32 // updates] * updates
            means = trainer._train_step(1)
            assert trainer.method.anchor is not None
            assert (trainer.method.anchor.updates, trainer.method.anchor.version) == (
                updates,
                updates // 2,
            )
            assert means["anchor/version"] == updates // 2
            assert means["tokens"] == sum(len(ids) for ids in ids_by_run[-1]) - prompts_of(step)
            assert (means["ratio/mean"] == pytest.approx(1, abs=1e-6)) == (updates == 1)
    assert ids_by_run[0] == ids_by_run[1]


def prompts_of(step: Any) -> int:
    return sum(item.sequence.start for update in step.updates for item in update)


def test_truncated_answers_can_be_left_out(material: tiny.Material, tmp_path: Path) -> None:
    """The gradient is that of the other answers; without any, it is exactly zero."""
    config = tiny.rl_job(
        material, method__mask_truncated=True, method__temperature=HOT, method__updates_per_step=1
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        (pending,) = trainer.method.steps(1).updates
        items = [cast(PendingRLSequence, item) for item in pending]
        assert all(item.is_included != cast(Rollout, item.sequence).truncated for item in items)
        # A random student hardly ever ends: mark some answers as ended.
        ended_items = [
            replace(item, is_included=True, weight=float(item.sequence.learned)) for item in items
        ]
        masked_items = [replace(item, is_included=False, weight=0.0) for item in items]
        trainer.learner.add_gradients([*ended_items[:12], *masked_items[12:]])
        gradients = gradient_of(trainer)
        trainer.learner.add_gradients(ended_items[:12])
        assert_near(gradients, gradient_of(trainer), 1e-5)
        means = add_gradients(trainer, masked_items)
        assert means["loss"] == 0
        assert all(not grad.any() for grad in gradient_of(trainer).values())


def test_a_pull_that_is_a_reward(material: tiny.Material, tmp_path: Path) -> None:
    """kl_in = "reward": the sampled KL is an advantage, with the KL of the row as its baseline."""
    config = tiny.rl_job(
        material,
        method__kl_in="reward",
        method__temperature=HOT,
        method__top_k=VOCABULARY,
        method__updates_per_step=1,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        trainer._train_step(1)
        (pending,) = trainer.method.steps(2).updates
        trainer.learner.add_gradients(pending)
        gradients = gradient_of(trainer)
        losses = []
        for item, log_p, log_q, log_ratio in run_plain_passes(trainer, pending):
            token = item.sequence.completion[:, None]
            gap = (log_p - log_q).gather(1, token)[:, 0]
            kl = exact_kl(log_p, log_q, direction="reverse")
            advantage = item.advantage + 0.2 * (kl - gap).detach()
            losses.append(-log_ratio.exp() * advantage)
        torch.cat(losses).mean().backward()
        assert_near(gradients, gradient_of(trainer), 2e-3)


def test_a_pull_that_is_a_reward_is_clipped_as_one(material: tiny.Material, tmp_path: Path) -> None:
    """Ratios are clipped without any other reward."""
    config = tiny.rl_job(
        material,
        reward=None,
        anchor__context="{answer} {prompt}",
        method__kl_in="reward",
        method__clip_low=0.0,
        method__clip_high=0.0,
        train__learning_rate=0.05,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        with torch.no_grad():
            trainer.student.trained.model.get_output_embeddings().weight.mul_(1.5)
        assert trainer._train_step(1)["ratio/clipped"] > 0


def test_a_head_of_more_ids_than_there_are(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(material, method__top_k=VOCABULARY + 1)
    with (
        pytest.raises(InvalidInput, match=f"the {VOCABULARY} token ids of the student") as caught,
        trainer_of(tmp_path / "run", config),
    ):
        pass
    assert caught.value.field == "method.top_k"


@pytest.mark.parametrize(
    "changes",
    [
        {"method__top_k": 0, "method__estimator": "k3"},
        {"method__divergence": "forward_kl", "method__importance_clip": (0.5, 2.0)},
        {
            "method__tail": "published",
            "anchor__context": "{answer}=",
            "reward": None,
        },
        {
            "method__ratio": "sequence",
            "method__beta": 0.0,
            "method__aggregate": "seq-mean-token-mean",
        },
        {"method__advantages": "gae"},
        {"method__kl_in": "reward"},
    ],
)
def test_every_kind_trains_evaluates_and_explains_its_metrics(
    material: tiny.Material, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = tiny.rl_job(material, max_steps=2, eval__every=2, **changes)
    with trainer_of(tmp_path / "run", config) as trainer:
        assert trainer.train() == "succeeded"
    first, _, last = metrics_of(trainer.run)
    assert metrics.__doc__ is not None
    explained = {line.split()[0].strip(",;") for line in metrics.__doc__.splitlines() if line}
    names = {name for name in last if not name.startswith("time/")}
    assert names - {"attempt", "step"} <= explained
    assert {"eval/accuracy", "ratio/clipped", "entropy", "time/anchor"} <= last.keys()
    assert ("eval/anchor/accuracy" in first) == ("kl/anchor" in last) == bool(config.method.beta)
    lines = (trainer.run.samples / "step-000002.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert all({"prompt", "answer", "reference"} <= sample.keys() for sample in samples)
    assert all(("reward" in sample) == (config.reward is not None) for sample in samples)
    assert ("reward/flat_groups" in last) == ("eval/reward" in last) == (config.reward is not None)
