"""The groups of an RL step: prompts, answers and rewards, sampled in one round or in several.

With `method.dynamic_sampling` > 1 a group whose rewards are all equal, which has no advantage, is
replaced by one of a further prompt (dynamic sampling of DAPO, arXiv 2503.14476, section 3.2).
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
from student_trainer.data.metric_sums import sum_and_count
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.losses.advantages import flat_groups
from student_trainer.methods.rl_prompts import PromptSource
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.rewards.rollout_rewards import RolloutRewards, reward_metrics
from student_trainer.teachers.scored_rollouts import RolloutsOfSteps, ScoredRollouts
from student_trainer.teachers.source import PendingRows

Item = TypeVar("Item")


@dataclass(frozen=True)
class Groups:
    """This process's groups of a step: G groups of n answers, in the order of the updates.

    written: G * n rollouts whose rows are requested, group by group. rewards: [G, n] float64, NaN
    if an answer has none. measured: metrics as in `Step`, over all answers that were sampled.
    reward_seconds: time spent on rewards.
    """

    written: list[PendingRows]
    rewards: Tensor
    measured: dict[str, Tensor]
    reward_seconds: float


class GroupSampler:
    """Samples and judges the groups of a step; every process samples whole groups.

    Round r of step s takes the prompts that step (s - 1) * N + r of a job with one round a step
    would take, N being `method.dynamic_sampling` and r in 1..N. So the prompts of a step do not
    depend on how many rounds earlier steps needed; those of rounds that were not needed are left
    out until a later epoch.
    """

    def __init__(
        self,
        config: RLJob,
        accelerator: Accelerator,
        prompts: PromptSource,
        training: RolloutsOfSteps,
        answers: ScoredRollouts,
        judged: RolloutRewards | None,
    ) -> None:
        """Keep the parts.

        `training`: samples the rollouts of a step of one round. `answers`: samples those of several
        rounds. `judged`: None if the job has no reward.
        """
        self._size = config.method.rollouts_per_prompt
        self._updates = config.method.updates_per_step
        self._rounds = config.method.dynamic_sampling
        self._count = config.train.prompts_per_step
        self._accelerator = accelerator
        self._prompts = prompts
        self._training = training
        self._answers = answers
        self._judged = judged

    def shares(self) -> list[range]:
        """Return the indices of this process's prompts for each update of a step."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        ends = [self._count * update // self._updates for update in range(self._updates + 1)]
        return [range(first + rank, last, world) for first, last in pairwise(ends)]

    def of_step(self, step: int) -> Groups:
        """Collective. Sample the groups of `step` (from 1), as many as `shares` has indices.

        A DistillError of one rank is raised on all ranks.
        """
        if self._rounds > 1:
            return self._in_rounds(step)
        written = raise_on_all_ranks(
            self._accelerator, lambda: self._training.of_step(step, self._asked)
        )
        began = time.monotonic()
        asked, _ = self._asked(step)
        rollouts = [cast(Rollout, item.sequence) for item in written]
        rewards = self._rewards(asked, rollouts)
        measured = reward_metrics(rewards) if self._judged else {}
        measured |= self._training.metrics(step, written)
        return Groups(written, rewards, measured, time.monotonic() - began)

    def _in_rounds(self, step: int) -> Groups:
        """Collective. Sample in rounds until every process has its groups, or rounds run out.

        Groups with different rewards are chosen first, in the order of sampling, then the earliest
        of the others. The numbers of groups and rounds are those of a job without dynamic sampling
        on every process, so all ranks run the same collectives. Rows are requested at the end, for
        the chosen groups only.
        """
        wanted = sum(map(len, self.shares()))
        spread: list[tuple[list[Rollout], Tensor]] = []
        flat: list[tuple[list[Rollout], Tensor]] = []
        seconds, rounds = 0.0, 0
        while rounds < self._rounds and max_over_ranks(
            self._accelerator, int(len(spread) < wanted)
        ):
            rounds += 1
            # A process that has its groups samples nothing more, but takes part in the round.
            missing = len(spread) < wanted
            number = (step - 1) * self._rounds + rounds
            asked, numbers = self._asked(number) if missing else ([], [])
            rollouts = self._sampled(asked, numbers)
            began = time.monotonic()
            rewards = self._rewards(asked, rollouts)
            seconds += time.monotonic() - began
            for group, is_flat in enumerate(flat_groups(rewards).tolist()):
                of_group = rollouts[group * self._size : (group + 1) * self._size]
                (flat if is_flat else spread).append((of_group, rewards[group]))
        chosen = self._dealt([*spread, *flat][:wanted])
        kept = [rollout for group, _ in chosen for rollout in group]
        written = raise_on_all_ranks(self._accelerator, lambda: self._answers.request_rows(kept))
        everything = torch.stack([rewards for _, rewards in (*spread, *flat)])
        dropped = float(len(everything) - wanted)
        main = float(self._accelerator.is_main_process)  # a count over all processes: divided by 1
        measured = {
            **reward_metrics(everything),
            "sampling/rounds": sum_and_count(torch.tensor([float(rounds)])),
            "sampling/dropped": torch.tensor([dropped, main]),
        }
        return Groups(written, torch.stack([of for _, of in chosen]), measured, seconds)

    def _dealt(self, chosen: Sequence[Item]) -> list[Item]:
        """Return the groups in the order of updates, dealt to them in turn.

        So every update has its part of the first groups, whose rewards differ.
        """
        shares = enumerate(self.shares())
        places = [(turn, update) for update, share in shares for turn in range(len(share))]
        in_turn = sorted(range(len(places)), key=places.__getitem__)
        at = dict(zip(in_turn, chosen, strict=True))
        return [at[place] for place in range(len(places))]

    def _sampled(self, asked: Sequence[Prompt], numbers: Sequence[int]) -> list[Rollout]:
        return raise_on_all_ranks(self._accelerator, lambda: self._answers.sample(asked, numbers))

    def _asked(self, number: int) -> tuple[list[Prompt], list[int]]:
        """Return the prompts and the rollout numbers of this process in round `number` (from 1)."""
        prompts = self._prompts.of_step(number, self._count)
        mine = [index for share in self.shares() for index in share]
        offset = (number - 1) * self._count * self._size
        numbers = [offset + index * self._size + n for index in mine for n in range(self._size)]
        return [prompts[index] for index in mine for _ in range(self._size)], numbers

    def _rewards(self, asked: Sequence[Prompt], rollouts: Sequence[Rollout]) -> Tensor:
        """Return rewards [G, n] float64 of G groups of n answers; NaN if an answer has none."""
        values = np.full(len(rollouts), np.nan)
        if self._judged is not None and rollouts:
            values = self._judged(asked, rollouts)
        return torch.from_numpy(values).reshape(-1, self._size)
