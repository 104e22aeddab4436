"""Options of the RL loop: rounds of sampling, epochs, betas, sampled held-out answers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from clients.config.rl import RLJob
from student_trainer.data.sequence import Rollout
from student_trainer.loop.evaluation import Samples, TaskEvaluation
from student_trainer.loop.step import Step
from student_trainer.loop.trainer import Trainer
from student_trainer.methods.rl import PendingRLSequence
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.test_rl import (
    HOT,
    VOCABULARY,
    assert_near,
    expected_gradient,
    gradient_of,
    trainer_of,
)


def texts_of(step: Step) -> list[list[list[int]]]:
    """Return the token ids of each update."""
    return [[item.sequence.token_ids.tolist() for item in update] for update in step.updates]


# Rounds of sampling. ------------------------------------------------------------------------------

ROUNDS, SIZE, PROMPTS = 3, 2, 6
# Half of the pairs of answers have equal rewards.
PAIRS: dict[str, Any] = {
    "method__rollouts_per_prompt": SIZE,
    "method__temperature": HOT,
    "train__prompts_per_step": PROMPTS,
    "reward": {"type": "regex", "pattern": "[1-3]"},
}


def groups_of(trainer: Trainer, step: int) -> list[tuple[list[list[int]], bool]]:
    """Return (token ids of the answers, whether rewards differ) of each group of a step."""
    (update, *later_updates) = trainer.method.steps(step).updates
    items = [cast(PendingRLSequence, item) for part in (update, *later_updates) for item in part]
    groups = []
    for first in range(0, len(items), SIZE):
        group = items[first : first + SIZE]
        ids = [item.sequence.token_ids.tolist() for item in group]
        groups.append((ids, any(item.advantage for item in group)))
    return groups


def test_rounds_replace_groups_with_equal_rewards(material: tiny.Material, tmp_path: Path) -> None:
    """Compared with the definition, from groups of a job without rounds; steps are independent."""
    with trainer_of(tmp_path / "plain", tiny.rl_job(material, **PAIRS)) as trainer:
        groups_by_step = {step: groups_of(trainer, step) for step in range(1, 4 * ROUNDS + 1)}
    expected, counts = {}, {}
    for step in range(1, 5):
        unequal_groups: list[list[list[int]]] = []
        equal_groups: list[list[list[int]]] = []
        rounds = 0
        while rounds < ROUNDS and len(unequal_groups) < PROMPTS:
            rounds += 1
            for ids, differs in groups_by_step[(step - 1) * ROUNDS + rounds]:
                (unequal_groups if differs else equal_groups).append(ids)
        chosen = (unequal_groups + equal_groups)[:PROMPTS]
        # Groups alternate between the two updates, so each has a share of the unequal groups.
        expected[step] = [[ids for group in chosen[n::2] for ids in group] for n in range(2)]
        counts[step] = (rounds, PROMPTS * (rounds - 1))
    assert {rounds for rounds, _ in counts.values()} > {2}, "it depends on the step"
    config = tiny.rl_job(material, **PAIRS, method__dynamic_sampling=ROUNDS)
    with trainer_of(tmp_path / "rounds", config) as trainer:
        for step in (3, 1, 4, 2):
            step_of_rounds = trainer.method.steps(step)
            assert texts_of(step_of_rounds) == expected[step]
            assert [len(update) for update in step_of_rounds.updates] == [PROMPTS * SIZE // 2] * 2
            metrics = {name: value.tolist() for name, value in step_of_rounds.metric_sums.items()}
            rounds, dropped = counts[step]
            assert metrics["sampling/rounds"] == [rounds, 1]
            assert metrics["sampling/dropped"] == [dropped, 1]
            assert metrics["reward/flat_groups"][1] == PROMPTS * rounds
        means = trainer._train_step(1)
        assert (means["sampling/rounds"], means["sampling/dropped"]) == counts[1]


def test_rounds_that_find_nothing_end(material: tiny.Material, tmp_path: Path) -> None:
    """If no answer is rewarded, the step has the groups of its first round."""
    config = tiny.rl_job(
        material,
        **{**PAIRS, "reward": {"type": "regex", "pattern": "x"}},
        method__dynamic_sampling=2,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        step = trainer.method.steps(1)
        assert step.metric_sums["sampling/rounds"].tolist() == [2, 1]
        assert step.metric_sums["sampling/dropped"].tolist() == [PROMPTS, 1]
        assert trainer._train_step(1)["reward/flat_groups"] == 1
    plain_config = tiny.rl_job(material, **PAIRS)
    with trainer_of(tmp_path / "plain", plain_config) as trainer:
        expected = [ids for update in texts_of(trainer.method.steps(1)) for ids in update]
    assert sorted(expected) == sorted(ids for update in texts_of(step) for ids in update)


# Epochs. ------------------------------------------------------------------------------------------


def test_the_second_epoch_has_the_gradient_of_the_formula(
    material: tiny.Material, tmp_path: Path
) -> None:
    """The second epoch has the same rollouts and p_old, and the weights after the first epoch."""
    config = tiny.rl_job(
        material,
        method__top_k=VOCABULARY,
        method__temperature=HOT,
        method__updates_per_step=1,
        method__epochs_per_step=2,
        anchor={"tau": 1.0},
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        first, second = trainer.method.steps(1).updates
        assert [a.sequence for a in first] == [b.sequence for b in second]
        assert all(cast(PendingRLSequence, item).old_logprobs is None for item in first)
        trainer.learner.learn(1, first, 0.05)
        means = add_gradients(trainer, second)
        gradients = gradient_of(trainer)
        expected = expected_gradient(trainer, second, config.method.beta, by_sequence=False)
        assert_near(gradients, expected, 2e-3)
        assert 0 < means["ratio/clipped"] < 1
        assert means["ratio/kl"] > 1e-4


def test_epochs_repeat_the_updates(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(material, method__epochs_per_step=3, method__temperature=HOT)
    with trainer_of(tmp_path / "run", config) as trainer:
        step = trainer.method.steps(1)
        first_update, second_update, *later_updates = texts_of(step)
        assert later_updates == [first_update, second_update, first_update, second_update]
        old_logprobs = [
            [cast(PendingRLSequence, item).old_logprobs for item in update]
            for update in step.updates
        ]
        assert all(item_logprobs is None for item_logprobs in old_logprobs[0])
        for update, logprobs in zip(step.updates[1:], old_logprobs[1:], strict=True):
            for item, item_logprobs in zip(update, logprobs, strict=True):
                assert item_logprobs is not None
                sampler_logprobs = cast(Rollout, item.sequence).token_logprobs
                # p_old is the sampling policy.
                assert (item_logprobs - sampler_logprobs).abs().max() < 1e-5
        trainer._train_step(1)
        assert trainer.method.anchor is not None
        assert trainer.method.anchor.updates == 6


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_critic_learns_as_often(material: tiny.Material, tmp_path: Path, epochs: int) -> None:
    config = tiny.rl_job(material, method__advantages="gae", method__epochs_per_step=epochs)
    with trainer_of(tmp_path / "run", config) as trainer:
        trainer._train_step(1)
        assert trainer.method.critic is not None
        assert trainer.method.critic.state()["linear.weight/step"] == 2 * epochs


# Betas. -------------------------------------------------------------------------------------------


def test_adam_has_the_betas_of_the_job(material: tiny.Material, tmp_path: Path) -> None:
    """Two updates with known gradients, by Kingma and Ba's formula in float64."""
    betas = (0.6, 0.8)
    config = tiny.rl_job(material, train__adam_betas=betas, train__max_grad_norm=1e9)
    with trainer_of(tmp_path / "run", config) as trainer:
        weight = next(trainer.student.trained.parameters())
        value = weight.detach().double().clone()
        mean, square = torch.zeros_like(value), torch.zeros_like(value)
        for update, scale in enumerate((1.0, -0.3), 1):
            grad = scale * torch.linspace(-1, 1, weight.numel()).view_as(weight)
            for parameter in trainer.student.trained.parameters():
                parameter.grad = torch.zeros_like(parameter)
            weight.grad = grad.clone()
            trainer.learner.update(1, 0.01, norm=1.0)
            mean = betas[0] * mean + (1 - betas[0]) * grad.double()
            square = betas[1] * square + (1 - betas[1]) * grad.double() ** 2
            unbiased = mean / (1 - betas[0] ** update), square / (1 - betas[1] ** update)
            value -= 0.01 * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
            torch.testing.assert_close(weight.detach().double(), value, rtol=0, atol=1e-6)


# Sampled held-out answers. ------------------------------------------------------------------------


def test_the_evaluation_is_the_mean_of_the_samples(material: tiny.Material, tmp_path: Path) -> None:
    """eval/reward and its standard error over prompts, compared with samples of the test."""
    samples, temperature = 3, 2.0
    config: RLJob = tiny.rl_job(
        material,
        method__beta=0.0,
        method__temperature=HOT,
        eval__samples=samples,
        eval__temperature=temperature,
    )
    with trainer_of(tmp_path / "run", config) as trainer:
        evaluated = trainer._evaluate()
        assert trainer._evaluate() == evaluated
        evaluation = cast(Any, trainer.method.evaluation)._task_evaluation
        prompts = [prompt for _, prompt in evaluation._prompts]
        rollouts = HuggingFaceRollouts(
            Sampler(
                trainer.student.full.model, trainer.tokenizer, top_k=1, temperature=temperature
            ),
            max_new_tokens=6,
            batch_tokens=10_000,
        )
        rewards = np.zeros((len(prompts), samples))
        for index, prompt in enumerate(prompts):
            # -1 to -len(prompts) are the held-out rollouts of eval/kl.
            numbers = [-1 - len(prompts) - index * samples - n for n in range(samples)]
            (batch,) = rollouts.generate([prompt] * samples, numbers, seed=config.seed)
            answers = [rollout.answer_text(trainer.tokenizer) for rollout in batch]
            rewards[index] = [bool(re.search("1", text)) for text in answers]
        assert evaluated["eval/reward"] == pytest.approx(rewards.mean())
        error = rewards.mean(1).std(ddof=1) / len(prompts) ** 0.5
        assert evaluated["eval/reward_stderr"] == pytest.approx(error)
        assert error > 0


def test_samples_do_not_depend_on_the_processes(material: tiny.Material, tmp_path: Path) -> None:
    config = tiny.rl_job(material, eval__samples=2, eval__temperature=HOT)
    with trainer_of(tmp_path / "run", config) as trainer:
        evaluation = cast(Any, trainer.method.evaluation)._task_evaluation
        prompts = [prompt for _, prompt in evaluation._prompts]
        shares = [
            TaskEvaluation(
                prompts,
                cast(Any, SimpleNamespace(process_index=rank, num_processes=3)),
                trainer.tokenizer,
                evaluation._rollouts,
                rollout_rewards=evaluation._rollout_rewards,
                samples=Samples(2, config.seed, first=-1 - len(prompts)),
            )
            for rank in range(3)
        ]
        sums, spread, _ = evaluation()
        parts = [share() for share in shares]
        assert torch.allclose(sum(part for part, _, _ in parts), sums)  # type: ignore[arg-type]
        assert torch.allclose(sum(part for _, part, _ in parts), spread)  # type: ignore[arg-type]
        assert sums[1, 1] == 2 * len(prompts)
