"""The steps of a job that learns from rewards: groups of answers, judged and scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from protos.rows.codec import RowBlock
from student_trainer.critic.advantages import Values
from student_trainer.data.batch import unread
from student_trainer.data.prompts import Prompt
from student_trainer.loop.step import Step
from student_trainer.losses.advantages import group_advantages
from student_trainer.losses.aggregate import sequence_weights
from student_trainer.methods.on_policy import Answers
from student_trainer.methods.rl_prompts import RLPrompts
from student_trainer.objectives.rl import ScoredRollout
from student_trainer.parallel.collectives import together
from student_trainer.rewards.rollout_rewards import Judged, reward_metrics, search_metrics
from student_trainer.rollouts.hf import Rollout
from student_trainer.teachers.anchor import AnchorTeacher
from student_trainer.teachers.source import PendingRows, resolved


@dataclass(frozen=True)
class PendingRollout(PendingRows):
    """`others`, `advantage` and `kept` as of a ScoredRollout; `weight` of the whole answer."""

    others: tuple[RowBlock, ...]
    advantage: Tensor
    kept: bool
    weight: float

    @property
    def counts(self) -> float:
        return self.weight

    def wait(self) -> ScoredRollout:
        learned = self.sequence.learned_rows
        others = tuple(learned(rows) for rows in self.others)
        return ScoredRollout(
            self.sequence, learned(self.rows.result()), others, self.advantage, self.kept
        )


class Unscored:
    """A TeacherSource where there is no teacher: rows that nothing is learned from."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        return resolved(unread(rollout.head_ids.numpy().astype(np.int32)))


class RLSteps:
    """Every process writes whole groups, so that advantages need no other's rewards."""

    def __init__(
        self,
        config: RLJob,
        accelerator: Accelerator,
        prompts: RLPrompts,
        answers: Answers,
        judged: Judged | None,
        anchor: AnchorTeacher | None,
        values: Values | None,
    ) -> None:
        """`answers`: scored by the teacher, or by nobody; `judged`: None where nothing rewards;
        `values`: None where an answer is compared with its group.
        """
        self._method = config.method
        self._taught = config.teacher is not None
        self._searches = config.environment is not None
        self._prompts_per_step = config.train.prompts_per_step
        self._accelerator = accelerator
        self._prompts = prompts
        self._answers = answers
        self._judged = judged
        self._anchor = anchor
        self._values = values
        rank, world = accelerator.process_index, accelerator.num_processes
        self._held_out = list(enumerate(prompts.held_out))[rank::world]

    def of_step(self, step: int) -> Step:
        """Raises in every process what is raised in one."""
        size = self._method.rollouts_per_prompt
        prompts = self._prompts.training.of_step(step, self._prompts_per_step)
        shares = self._shares(len(prompts))
        mine = [index for share in shares for index in share for _ in range(size)]
        first = (step - 1) * len(prompts) * size
        numbers = [first + index * size + n % size for n, index in enumerate(mine)]
        asked = [prompts[index] for index in mine]
        written = together(self._accelerator, lambda: self._written(asked, numbers))
        began = time.monotonic()
        rewards = self._rewards(asked, written)
        judged = time.monotonic()
        scored = self._scored(written)
        seconds = {"time/reward": judged - began, "time/anchor": time.monotonic() - judged}
        measured = reward_metrics(rewards) if self._judged else {}
        advantages = self._advantages(_rollouts(written), rewards, measured)
        rollouts = iter(self._weighed(scored, advantages))
        updates = [list(islice(rollouts, len(share) * size)) for share in shares]
        if self._searches:
            measured |= search_metrics(_rollouts(written))
        return Step(updates, measured, seconds)

    def held_out(self) -> list[PendingRows]:
        """Always the same prompts and random numbers, so that two evaluations compare."""
        # Below the training rollouts' numbers, which count from 0.
        numbers = [-1 - index for index, _ in self._held_out]
        return self._answers.to([prompt for _, prompt in self._held_out], numbers)

    def _shares(self, count: int) -> list[range]:
        """Which of a step's prompts are this process's, for each update."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        updates = self._method.updates_per_step
        ends = [count * update // updates for update in range(updates + 1)]
        return [range(first + rank, last, world) for first, last in pairwise(ends)]

    def _written(self, asked: Sequence[Prompt], numbers: Sequence[int]) -> list[PendingRows]:
        written = self._answers.gathered_to(asked, numbers)
        if self._taught and self._anchor is not None and self._method.direction == "forward":
            return [_at_its_head(item) for item in written]
        return written

    def _rewards(self, asked: Sequence[Prompt], written: Sequence[PendingRows]) -> Tensor:
        """[G, n] float64, NaN where there is none."""
        values = np.full(len(written), np.nan)
        if self._judged is not None:
            values = self._judged(asked, _rollouts(written))
        return torch.from_numpy(values).reshape(-1, self._method.rollouts_per_prompt)

    def _scored(self, written: list[PendingRows]) -> list[tuple[PendingRows, tuple[RowBlock, ...]]]:
        """With the anchor's rows: in the place of none, or besides the teacher's."""
        if self._anchor is None:
            return [(item, ()) for item in written]
        blocks = self._anchor.score_all(_rollouts(written))
        if self._taught:
            return [(item, (block,)) for item, block in zip(written, blocks, strict=True)]
        return [
            (PendingRows(item.sequence, resolved(block)), ())
            for item, block in zip(written, blocks, strict=True)
        ]

    def _advantages(
        self, rollouts: Sequence[Rollout], rewards: Tensor, measured: dict[str, Tensor]
    ) -> list[Tensor]:
        """Of each answer, [] or [learned]."""
        weight = self._method.reward_weight
        if self._values is None:
            by_std = self._method.advantages == "group"
            of_group = group_advantages(rewards, scale_by_std=by_std) * weight
            return list(of_group.float().flatten())
        of_tokens, measured["critic/loss"] = self._values(rollouts, rewards.flatten())
        return [advantage * weight for advantage in of_tokens]

    def _weighed(
        self,
        scored: Sequence[tuple[PendingRows, tuple[RowBlock, ...]]],
        advantages: Sequence[Tensor],
    ) -> list[PendingRollout]:
        method = self._method
        sequences = _rollouts([item for item, _ in scored])
        kept = torch.tensor([not (method.mask_truncated and one.truncated) for one in sequences])
        lengths = torch.tensor([one.learned for one in sequences])
        weights = sequence_weights(lengths, kept, method.aggregate)
        return [
            PendingRollout(item.sequence, item.rows, others, *of_answer)
            for (item, others), *of_answer in zip(
                scored, advantages, kept.tolist(), weights.tolist(), strict=True
            )
        ]


def _at_its_head(item: PendingRows) -> PendingRows:
    """The anchor is asked at the ids that the teacher chose. Waits for them."""
    head = torch.from_numpy(item.rows.result().head_ids).long()
    return PendingRows(replace(cast(Rollout, item.sequence), head_ids=head), item.rows)


def _rollouts(written: Sequence[PendingRows]) -> list[Rollout]:
    return [cast(Rollout, item.sequence) for item in written]
