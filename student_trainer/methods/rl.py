"""The steps of a job that learns from rewards: groups of answers, judged and scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from protos.rows.codec import RowBlock
from student_trainer.critic.advantages import CriticAdvantages
from student_trainer.data.batch import unread
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.environments.retriever import Retriever
from student_trainer.loop.evaluation import Evaluation, TaskEvaluation
from student_trainer.loop.step import Step
from student_trainer.losses.advantages import group_advantages
from student_trainer.losses.aggregate import sequence_weights
from student_trainer.methods.method import Method, plain_rollouts
from student_trainer.methods.rl_prompts import RLPrompts
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.objectives.rl import RLObjective, RLSequence
from student_trainer.parallel.collectives import together
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards import Rewards
from student_trainer.rewards.rollout_rewards import RolloutRewards, reward_metrics, search_metrics
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.rollouts.search import SearchRollouts
from student_trainer.teachers.anchor import Anchor, AnchorTeacher
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.privileged import privileged_prompt
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from student_trainer.teachers.source import PendingRows, TeacherSource, resolved


@dataclass(frozen=True)
class PendingRLSequence(PendingRows):
    """`others`, `advantage` and `kept` as of a ScoredRollout; `weight` of the whole answer."""

    others: tuple[Future[RowBlock], ...]
    advantage: Tensor
    kept: bool
    weight: float

    @property
    def counts(self) -> float:
        return self.weight

    def wait(self) -> RLSequence:
        learned = self.sequence.learned_rows
        others = tuple(learned(rows.result()) for rows in self.others)
        return RLSequence(
            self.sequence, learned(self.rows.result()), others, self.advantage, self.kept
        )


class NoTeacher:
    """A TeacherSource where there is no teacher: rows that nothing is learned from."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        return resolved(unread(rollout.head_ids.numpy().astype(np.int32)))

    def finish(self) -> None:
        """Nothing to do."""


class RLSteps:
    """Every process writes whole groups, so that advantages need no other's rewards."""

    def __init__(
        self,
        config: RLJob,
        accelerator: Accelerator,
        prompts: RLPrompts,
        answers: ScoredRollouts,
        judged: RolloutRewards | None,
        sources: Sequence[TeacherSource],
        values: CriticAdvantages | None,
    ) -> None:
        """`answers`: rollouts with the rows of `sources[0]`; the rows of the other sources are
        asked for here, at the same head ids. `judged`: None if the job has no reward. `values`:
        None if an answer is compared with its group.
        """
        self._method = config.method
        self._searches = config.environment is not None
        self._prompts_per_step = config.train.prompts_per_step
        self._accelerator = accelerator
        self._prompts = prompts
        self._answers = answers
        self._judged = judged
        self._sources = sources
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
        others = self._other_rows(written)
        seconds = {"time/reward": judged - began, "time/anchor": time.monotonic() - judged}
        measured = reward_metrics(rewards) if self._judged else {}
        advantages = self._advantages(_rollouts(written), rewards, measured)
        rollouts = iter(self._weighed(written, others, advantages))
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
        if len(self._sources) > 1 and self._method.direction == "forward":
            return [_at_its_head(item) for item in written]
        return written

    def _rewards(self, asked: Sequence[Prompt], written: Sequence[PendingRows]) -> Tensor:
        """[G, n] float64, NaN where there is none."""
        values = np.full(len(written), np.nan)
        if self._judged is not None:
            values = self._judged(asked, _rollouts(written))
        return torch.from_numpy(values).reshape(-1, self._method.rollouts_per_prompt)

    def _other_rows(self, written: Sequence[PendingRows]) -> list[tuple[Future[RowBlock], ...]]:
        """Collective. The rows of every source after the first, for each answer."""
        rollouts = _rollouts(written)
        others = [tuple(source.score(one) for source in self._sources[1:]) for one in rollouts]
        for source in self._sources:
            source.finish()
        return others

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
        written: Sequence[PendingRows],
        others: Sequence[tuple[Future[RowBlock], ...]],
        advantages: Sequence[Tensor],
    ) -> list[PendingRLSequence]:
        method = self._method
        sequences = _rollouts(written)
        kept = torch.tensor([not (method.mask_truncated and one.truncated) for one in sequences])
        lengths = torch.tensor([one.learned for one in sequences])
        weights = sequence_weights(lengths, kept, method.aggregate)
        return [
            PendingRLSequence(item.sequence, item.rows, *of_answer)
            for item, *of_answer in zip(
                written, others, advantages, kept.tolist(), weights.tolist(), strict=True
            )
        ]


def _at_its_head(item: PendingRows) -> PendingRows:
    """The anchor is asked at the ids that the teacher chose. Waits for them."""
    head = torch.from_numpy(item.rows.result().head_ids).long()
    return PendingRows(replace(cast(Rollout, item.sequence), head_ids=head), item.rows)


def _rollouts(written: Sequence[PendingRows]) -> list[Rollout]:
    return [cast(Rollout, item.sequence) for item in written]


@dataclass(frozen=True)
class RLMaterial:
    """What was loaded before the weights. `most`: tokens that the student can read, if limited."""

    tokenizer: Any
    prompts: RLPrompts
    teachers: Mapping[str, Connection]
    rewards: Rewards | None
    retriever: Retriever | None
    most: int | None


def rl_method(
    config: RLJob, material: RLMaterial, accelerator: Accelerator, student: Replicated | Sharded
) -> Method:
    """Groups of answers, a reward for each, and a KL to a teacher, to the anchor, or to both."""
    method, rewards = config.method, material.rewards
    assert (rewards is None) == (config.reward is None), "the caller makes them"
    judged = None if rewards is None else RolloutRewards(rewards, material.tokenizer)
    rollouts = _make_rollouts(config, material, student)
    anchor, sources = None, _teacher(config, material)
    if method.beta:
        tau, period = config.anchor.tau, config.anchor.update_period
        anchor = Anchor(student, tau=tau, update_period=period)
        sources += (_anchor_teacher(config, material, anchor, accelerator, student),)
    sources = sources or (NoTeacher(),)
    answers = ScoredRollouts(student, rollouts, sources[0], config.seed)
    values = None
    if method.advantages == "gae" and judged is not None:
        values = CriticAdvantages(accelerator, student, method, config.train.tokens_per_micro_batch)
    steps = RLSteps(config, accelerator, material.prompts, answers, judged, sources, values)
    evaluation = Evaluation(
        accelerator,
        DistillationObjective(method.direction, "bucket+sampled", method.temperature),
        list if config.teacher is None else steps.held_out,
        TaskEvaluation(
            material.prompts.held_out,
            accelerator,
            material.tokenizer,
            rollouts,
            matched=config.eval.metric == "exact_match",
            judged=judged,
        ),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
    return Method(RLObjective.of(config), steps.of_step, evaluation, anchor, values)


def _make_rollouts(config: RLJob, material: RLMaterial, student: Replicated | Sharded) -> Rollouts:
    method = config.method
    # Where the sampled token is all that counts, rows have a head still, of one id.
    top_k = max(method.top_k, 1)
    if config.environment is None:
        return plain_rollouts(
            config, student, material.tokenizer, top_k=top_k, temperature=method.temperature
        )
    assert material.retriever is not None, "the environment has one"
    return SearchRollouts(
        Sampler(
            student.whole.model,
            material.tokenizer,
            top_k=top_k,
            temperature=method.temperature,
            bf16=config.student.dtype == "bfloat16",
        ),
        material.tokenizer,
        material.retriever,
        config.environment,
        max_new_tokens=method.max_new_tokens,
        batch_tokens=4 * config.train.tokens_per_micro_batch,
    )


def _teacher(config: RLJob, material: RLMaterial) -> tuple[TeacherSource, ...]:
    if config.teacher is None:
        return ()
    method = config.method
    remote = RemoteTeacher(
        material.teachers[""].client,
        top_k=None if method.direction == "reverse" else max(method.top_k, 1),
        temperature=method.temperature,
        f32=config.teacher.logprob_format == "f32",
    )
    return (remote,)


def _anchor_teacher(
    config: RLJob,
    material: RLMaterial,
    anchor: Anchor,
    accelerator: Accelerator,
    student: Replicated | Sharded,
) -> AnchorTeacher:
    """Its own head is of forward KL; beside a teacher it takes the teacher's."""
    method = config.method
    own_head = method.direction == "forward" and config.teacher is None
    return AnchorTeacher(
        anchor,
        student,
        accelerator,
        temperature=method.temperature,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        top_k=max(method.top_k, 1) if own_head else None,
        prompt=_context(config, material),
    )


def _context(config: RLJob, material: RLMaterial) -> Callable[[Rollout], Tensor] | None:
    if config.anchor.context is None:
        return None
    asked = config.data or config.reward
    assert asked is not None, "one of them has the prompts"
    return privileged_prompt(
        config.anchor.context, asked.template, material.tokenizer, material.most
    )
