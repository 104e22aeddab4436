"""The rewards of rollouts, and the metrics of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from student_trainer.data.batch import sum_and_count
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.losses.advantages import flat_groups
from student_trainer.rewards import Rewards, RewardSample


class RolloutRewards:
    """Decodes the answers of rollouts, and scores them."""

    def __init__(self, rewards: Rewards, tokenizer: Any) -> None:
        """Store the arguments.

        The caller must close `rewards` after the last use of this object.
        """
        self._rewards = rewards
        self._tokenizer = tokenizer

    def texts(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[RewardSample]:
        """Return the sample to score for each rollout. rollouts[i] is an answer to prompts[i]."""
        return [
            RewardSample(
                prompt=prompt.text,
                text=rollout.answer_text(self._tokenizer),
                reference=prompt.answer,
                fields=prompt.fields,
                tokens=rollout.learned,
            )
            for prompt, rollout in zip(prompts, rollouts, strict=True)
        ]

    def __call__(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> NDArray[np.float64]:
        """Return the reward of each rollout, [n]. rollouts[i] is an answer to prompts[i].

        The reward is NaN if the answer could not be scored, or if the environment of the rollout
        failed.
        """
        values = self._rewards(self.texts(prompts, rollouts)).values
        return np.where([rollout.failed for rollout in rollouts], np.nan, values)


def reward_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Return (sum, number) of each reward metric, by name.

    `rewards`: [G, n], the rewards of n answers to each of G prompts.
    """
    is_scored = rewards.isfinite()
    deviations = [
        group[mask].std(correction=0) for group, mask in zip(rewards, is_scored, strict=True)
    ]
    return {
        "reward/mean": sum_and_count(rewards[is_scored]),
        "reward/std": sum_and_count(torch.stack(deviations).nan_to_num()),
        "reward/flat_groups": sum_and_count(flat_groups(rewards).double()),
        "reward/errors": sum_and_count((~is_scored).double().flatten()),
    }


def search_metrics(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return (sum, number) of each metric of search queries, by name."""
    return {
        "search/queries": sum_and_count(
            torch.tensor([float(rollout.queries) for rollout in rollouts])
        ),
        "search/failed": sum_and_count(
            torch.tensor([float(rollout.failed) for rollout in rollouts])
        ),
    }
