"""Samples the groups of an RL step (prompts, answers and rewards), in one round or in several.

If all rewards of a group are equal, its advantages are 0 and the student learns nothing from it.
With `method.dynamic_sampling` > 1, the group of another prompt replaces it (dynamic sampling of
DAPO, arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from student_trainer.data.batch import sum_and_count
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.losses.advantages import flat_groups
from student_trainer.methods.rl_prompts import PromptSource
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.rewards.rollout_rewards import RolloutRewards, reward_metrics
from student_trainer.teachers.scored_rollouts import RolloutsOfSteps, ScoredRollouts
from student_trainer.teachers.source import PendingRows

Item = TypeVar("Item")


@dataclass(frozen=True)
class Groups:
    """The groups of this process in a step: G groups of n answers, in the order of the updates.

    - pending: G * n rollouts whose rows are requested, group by group.
    - rewards: [G, n] float64, NaN if an answer has none.
    - metric_sums: the metrics of all sampled answers, see `Step`.
    - reward_seconds: time in seconds spent on rewards.
    """

    pending: list[PendingRows]
    rewards: Tensor
    metric_sums: dict[str, Tensor]
    reward_seconds: float


class GroupSampler:
    """Samples the groups of a step and computes their rewards; every process samples full groups.

    A step has up to N = `method.dynamic_sampling` rounds. Round r (1 to N) of step s uses the
    prompts that step (s - 1) * N + r would use in a job with one round per step. So the prompts of
    a step do not depend on the number of rounds of earlier steps. The prompts of rounds that were
    not needed are skipped until a later epoch.
    """

    def __init__(
        self,
        config: RLJob,
        accelerator: Accelerator,
        prompts: PromptSource,
        training: RolloutsOfSteps,
        answers: ScoredRollouts,
        rollout_rewards: RolloutRewards | None,
    ) -> None:
        """Set up the sampler.

        - training: samples the rollouts of a step that has one round.
        - answers: samples the rollouts of a step that has several rounds.
        - rollout_rewards: computes the rewards; None if the job has no reward.
        """
        self._size = config.method.rollouts_per_prompt
        self._updates = config.method.updates_per_step
        self._rounds = config.method.dynamic_sampling
        self._count = config.train.prompts_per_step
        self._accelerator = accelerator
        self._prompts = prompts
        self._training = training
        self._answers = answers
        self._rollout_rewards = rollout_rewards

    def shares(self) -> list[range]:
        """Return the indices of this process's prompts for each update of a step."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        ends = [self._count * update // self._updates for update in range(self._updates + 1)]
        return [range(first + rank, last, world) for first, last in pairwise(ends)]

    def of_step(self, step: int) -> Groups:
        """Collective. Sample the groups of `step` (from 1), one group for each index in `shares`.

        A DistillError of one rank is raised on all ranks.
        """
        if self._rounds > 1:
            return self._sample_in_rounds(step)
        pending = raise_on_all_ranks(
            self._accelerator, lambda: self._training.of_step(step, self._select_prompts)
        )
        started_at = time.monotonic()
        prompts, _ = self._select_prompts(step)
        rollouts = [cast(Rollout, item.sequence) for item in pending]
        rewards = self._compute_rewards(prompts, rollouts)
        metric_sums = reward_metrics(rewards) if self._rollout_rewards else {}
        metric_sums |= self._training.metrics(step, pending)
        return Groups(pending, rewards, metric_sums, time.monotonic() - started_at)

    def _sample_in_rounds(self, step: int) -> Groups:
        """Collective. Sample rounds until every process has enough groups or no round is left.

        Groups whose rewards differ are selected first, in the order of sampling, then the earliest
        groups whose rewards are equal. All ranks have the same number of groups and of rounds, so
        they run the same collectives. Rows are requested at the end, only for the selected groups.
        """
        group_count = sum(map(len, self.shares()))
        varied_groups: list[tuple[list[Rollout], Tensor]] = []
        uniform_groups: list[tuple[list[Rollout], Tensor]] = []
        seconds, rounds = 0.0, 0
        while rounds < self._rounds and max_over_ranks(
            self._accelerator, int(len(varied_groups) < group_count)
        ):
            rounds += 1
            # A process that has all its groups samples nothing, but takes part in the round.
            needs_groups = len(varied_groups) < group_count
            round_number = (step - 1) * self._rounds + rounds
            prompts, numbers = self._select_prompts(round_number) if needs_groups else ([], [])
            rollouts = self._sample_rollouts(prompts, numbers)
            started_at = time.monotonic()
            rewards = self._compute_rewards(prompts, rollouts)
            seconds += time.monotonic() - started_at
            for group, is_flat in enumerate(flat_groups(rewards).tolist()):
                group_rollouts = rollouts[group * self._size : (group + 1) * self._size]
                (uniform_groups if is_flat else varied_groups).append(
                    (group_rollouts, rewards[group])
                )
        chosen_groups = self._deal_groups([*varied_groups, *uniform_groups][:group_count])
        chosen_rollouts = [rollout for group, _ in chosen_groups for rollout in group]
        pending = raise_on_all_ranks(
            self._accelerator, lambda: self._answers.request_rows(chosen_rollouts)
        )
        all_rewards = torch.stack([rewards for _, rewards in (*varied_groups, *uniform_groups)])
        dropped_count = float(len(all_rewards) - group_count)
        is_main = float(
            self._accelerator.is_main_process
        )  # 1 in one process: the sum is a total, not a mean
        metric_sums = {
            **reward_metrics(all_rewards),
            "sampling/rounds": sum_and_count(torch.tensor([float(rounds)])),
            "sampling/dropped": torch.tensor([dropped_count, is_main]),
        }
        return Groups(
            pending,
            torch.stack([group_rewards for _, group_rewards in chosen_groups]),
            metric_sums,
            seconds,
        )

    def _deal_groups(self, groups: Sequence[Item]) -> list[Item]:
        """Assign the groups to the updates in turn, and return them in the order of the updates.

        The first groups are those whose rewards differ. In this way every update gets its share of
        them.
        """
        shares = enumerate(self.shares())
        places = [(turn, update) for update, share in shares for turn in range(len(share))]
        dealing_order = sorted(range(len(places)), key=places.__getitem__)
        groups_by_place = dict(zip(dealing_order, groups, strict=True))
        return [groups_by_place[place] for place in range(len(places))]

    def _sample_rollouts(self, prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[Rollout]:
        return raise_on_all_ranks(self._accelerator, lambda: self._answers.sample(prompts, numbers))

    def _select_prompts(self, round_number: int) -> tuple[list[Prompt], list[int]]:
        """Return this process's prompts and rollout numbers of round `round_number` (from 1)."""
        prompts = self._prompts.of_step(round_number, self._count)
        own_indices = [index for share in self.shares() for index in share]
        offset = (round_number - 1) * self._count * self._size
        numbers = [
            offset + index * self._size + n for index in own_indices for n in range(self._size)
        ]
        return [prompts[index] for index in own_indices for _ in range(self._size)], numbers

    def _compute_rewards(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> Tensor:
        """Return rewards [G, n] float64 for G groups of n answers.

        An answer without a reward has NaN.
        """
        values = np.full(len(rollouts), np.nan)
        if self._rollout_rewards is not None and rollouts:
            values = self._rollout_rewards(prompts, rollouts)
        return torch.from_numpy(values).reshape(-1, self._size)
