"""Reinforcement learning (GRPO, EMA-PG): groups of answers with rewards, and KL penalties.

One step, in order:

1. Prompts. `RLPrompts.training` (`methods/rl_prompts.py`) returns `train.prompts_per_step` prompts
   by the seed and the step number. They are divided among the `method.updates_per_step` updates,
   and the prompts of each update among the processes. A process samples a whole group of
   `method.rollouts_per_prompt` answers for each of its prompts. With `method.dynamic_sampling`,
   `GroupSampler` (`methods/rl_groups.py`) repeats items 1, 2 and 4 of this list with other prompts
   before item 3.
2. Rollouts. `HuggingFaceRollouts` (`rollouts/rollouts.py`) samples one completion for each prompt;
   with a table `environment`, `SearchRollouts` (`rollouts/search.py`) samples several turns. With a
   table `rollouts`, an engine samples (`rollout_client/engine_rollouts.py`): `SampledTokens`
   (`rollouts/sampler.py`) -> `Rollout` (`data/sequence.py`).
3. Rows of the first teacher source. `ScoredRollouts` (`teachers/scored_rollouts.py`) requests them
   for each rollout: `Rollout` -> `PendingRows` (`teachers/source.py`). The first source is the
   teacher service (`teachers/remote.py`), if the job has one. The next source is the anchor
   (`teachers/anchor.py`), if `method.beta` > 0. If the job has neither, the source is `NoTeacher`.
4. Rewards. `RolloutRewards` (`rewards/rollout_rewards.py`) scores the text of each answer.
5. Rows of the second source, if there is one, at the same head ids. The call of `finish` makes the
   anchor compute its rows.
6. Advantages. They are computed from the rewards of a group (`losses/advantages.py`), or with a
   critic and GAE (`critic.py`, which also trains the critic).
7. Weights. `sequence_weights` (`losses/aggregate.py`) returns the weight of each answer. The
   rollout, its rows, its advantage and its weight become one `PendingRLSequence`.
8. Log-probs under p_old, the student before the first update. `OldPolicy` (`methods/rl_parts.py`)
   computes them, because the policy gradient of all updates after the first needs them. The updates
   are repeated `method.epochs_per_step` times.
9. Micro-batches, for each update. The learner (`loop/learner.py`) groups the sequences
   (`data/packing.py`), waits for the rows of one group (`PendingRLSequence` -> `RLSequence`) and
   makes its tensors (`RLSequence` -> `RLBatch`, both in `objectives/rl.py`).
10. Loss. `RLObjective` (`objectives/rl.py`) computes the clipped policy gradient
    (`losses/policy.py`) and the KL to each source (`losses/topk.py`, `losses/sampled.py`) from
    their rows and the student's rows (`model/student.py`, which calls
    `losses/fused/linear_loss.py`).
11. Update. The trainer divides by the sum of the weights of all processes, clips the gradient, runs
    AdamW and calls `Anchor.after_update`.

`prepare` reads and checks the data that the job needs, and `build` connects these parts.
`assembly.py` calls both once when an attempt starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from clients.preflight.limits import check_lengths
from protos.rows.codec import RowBlock
from student_trainer.critic import CriticAdvantages
from student_trainer.cross_tokenizer.comparison import TokenizerPair
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.environments.retriever import make_retriever
from student_trainer.loop.evaluation import Evaluation, Samples, TaskEvaluation
from student_trainer.loop.learner import Method, Watch
from student_trainer.loop.step import Step
from student_trainer.loop.watches import RewardWatch, StabilityWatch
from student_trainer.losses.advantages import group_advantages
from student_trainer.losses.aggregate import sequence_weights
from student_trainer.methods.preparation import (
    Inputs,
    Preparation,
    check_shares,
    load_prompt_images,
    pair_tokenizers,
)
from student_trainer.methods.rl_groups import GroupSampler
from student_trainer.methods.rl_parts import (
    OldPolicy,
    RLMaterial,
    anchor_teacher,
    engine_rollouts,
    make_rollouts,
    teacher_sources,
)
from student_trainer.methods.rl_prompts import load_rl_prompts
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.objectives.rl import RLObjective, RLSequence
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards.rollout_rewards import RolloutRewards, search_metrics
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.run.model_checks import check_top_k
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from student_trainer.teachers.source import NoTeacher, PendingRows, TeacherSource


@dataclass(frozen=True)
class PendingRLSequence(PendingRows):
    """A rollout with its advantage and its weight. Its rows may not have arrived yet.

    - rows: the rows of the first teacher source.
    - other_rows: the rows of the other teacher sources.
    - advantage: a scalar for the full answer, or one value per learned token, [learned].
    - is_included: False if the loss excludes the answer.
    - weight: the weight of the answer in the mean of an update.
    - old_logprobs: see `RLSequence`.
    """

    other_rows: tuple[Future[RowBlock], ...]
    advantage: Tensor
    is_included: bool
    weight: float
    old_logprobs: Tensor | None = None

    @property
    def counts(self) -> float:
        """The weight of the answer. The trainer divides the loss by the sum of all weights."""
        return self.weight

    def wait(self) -> RLSequence:
        """Wait for the rows of all sources. Raises the error of a source that failed."""
        select_learned = self.sequence.learned_rows
        other_rows = tuple(select_learned(first_rows.result()) for first_rows in self.other_rows)
        first_rows = select_learned(self.rows.result())
        return RLSequence(
            self.sequence,
            first_rows,
            other_rows,
            self.advantage,
            self.is_included,
            self.old_logprobs,
        )


class RLSteps:
    """Returns the updates of each step: groups of rollouts with rewards.

    Each process samples whole groups, so it computes advantages without rewards from other
    processes.
    """

    def __init__(
        self,
        config: RLJob,
        accelerator: Accelerator,
        held_out: Sequence[Prompt],
        groups: GroupSampler,
        answers: ScoredRollouts,
        sources: Sequence[TeacherSource],
        critic: CriticAdvantages | None,
        old_policy: OldPolicy | None,
    ) -> None:
        """Set up the steps.

        - held_out: the held-out prompts of all processes; this process uses its share.
        - groups: samples the groups of a step.
        - answers: samples held-out rollouts and requests the rows of `sources[0]`.
        - sources: the models that score rollouts, at least one. The rows of the sources after the
          first are requested at the same head ids.
        - critic: None if advantages come from the group.
        - old_policy: computes the log-probs under p_old; None if the loss has no policy gradient.
        """
        self._method = config.method
        self._searches = config.environment is not None
        self._accelerator = accelerator
        self._groups = groups
        self._answers = answers
        self._sources = sources
        self._critic = critic
        self._old_policy = old_policy
        rank, world = accelerator.process_index, accelerator.num_processes
        self._held_out = list(enumerate(held_out))[rank::world]

    def of_step(self, step: int) -> Step:
        """Collective. Sample and score the rollouts of `step` (from 1), and divide them by update.

        A DistillError of one rank is raised on all ranks.
        """
        groups = self._groups.of_step(step)
        pending = raise_on_all_ranks(self._accelerator, lambda: self._use_one_head(groups.pending))
        started_at = time.monotonic()
        other_rows = self._request_other_rows(pending)
        seconds = {
            "time/reward": groups.reward_seconds,
            "time/anchor": time.monotonic() - started_at,
        }
        metric_sums = groups.metric_sums
        advantages = self._compute_advantages(_rollouts_of(pending), groups.rewards, metric_sums)
        rollouts = iter(self._build_sequences(pending, other_rows, advantages))
        group_size = self._method.rollouts_per_prompt
        update_parts = [
            list(islice(rollouts, len(share) * group_size)) for share in self._groups.shares()
        ]
        started_at = time.monotonic()
        updates = self._build_updates(update_parts)
        seconds["time/old_policy"] = time.monotonic() - started_at
        if self._searches:
            metric_sums |= search_metrics(_rollouts_of(pending))
        return Step(updates, metric_sums, seconds)

    def held_out(self) -> list[PendingRows]:
        """Sample this process's held-out rollouts and request their rows. Not collective.

        Call it inside `student.gathered()`. The prompts and the random numbers are the same at
        every call, so that evaluations at different steps are comparable.
        """
        # Negative: training rollouts are numbered from 0, and a number fixes the random stream.
        numbers = [-1 - index for index, _ in self._held_out]
        return self._answers.sample_and_score([prompt for _, prompt in self._held_out], numbers)

    def _use_one_head(self, pending: list[PendingRows]) -> list[PendingRows]:
        if len(self._sources) > 1 and self._method.direction == "forward":
            return [_use_teacher_head(item) for item in pending]
        return pending

    def _request_other_rows(
        self, pending: Sequence[PendingRows]
    ) -> list[tuple[Future[RowBlock], ...]]:
        """Collective. For each rollout, request the rows of all sources except the first."""
        rollouts = _rollouts_of(pending)
        other_rows = [
            tuple(source.score(rollout) for source in self._sources[1:]) for rollout in rollouts
        ]
        for source in self._sources:
            source.finish()
        return other_rows

    def _compute_advantages(
        self, rollouts: Sequence[Rollout], rewards: Tensor, metric_sums: dict[str, Tensor]
    ) -> list[Tensor]:
        """Return the advantage of each answer.

        It is a scalar, or, with a critic, one value per learned token.
        """
        weight = self._method.reward_weight
        if self._critic is None:
            scale_by_std = self._method.advantages == "group"
            group_values = group_advantages(rewards, scale_by_std=scale_by_std) * weight
            return list(group_values.float().flatten())
        token_advantages, metric_sums["critic/loss"] = self._critic(rollouts, rewards.flatten())
        return [advantage * weight for advantage in token_advantages]

    def _build_sequences(
        self,
        pending: Sequence[PendingRows],
        other_rows: Sequence[tuple[Future[RowBlock], ...]],
        advantages: Sequence[Tensor],
    ) -> list[PendingRLSequence]:
        method = self._method
        sequences = _rollouts_of(pending)
        included = torch.tensor(
            [not (method.mask_truncated and rollout.truncated) for rollout in sequences]
        )
        lengths = torch.tensor([rollout.learned for rollout in sequences])
        weights = sequence_weights(lengths, included, method.aggregate)
        return [
            PendingRLSequence(item.sequence, item.rows, *answer_values)
            for item, *answer_values in zip(
                pending, other_rows, advantages, included.tolist(), weights.tolist(), strict=True
            )
        ]

    def _build_updates(
        self, update_parts: list[list[PendingRLSequence]]
    ) -> list[list[PendingRLSequence]]:
        """Collective. Return the updates of all epochs of a step.

        `update_parts`: the updates of one epoch. The log-probs under p_old are computed once. All
        updates except the first receive them.
        """
        first_update, *later_updates = update_parts
        extra_epochs = self._method.epochs_per_step - 1
        scored_parts = update_parts if extra_epochs else later_updates
        if self._old_policy is None or not scored_parts:
            return update_parts * (1 + extra_epochs)
        old_logprobs = self._old_policy([_rollouts_of(sequences) for sequences in scored_parts])
        scored_updates = [
            [
                replace(item, old_logprobs=sequence_logprobs)
                for item, sequence_logprobs in zip(sequences, logprobs, strict=True)
            ]
            for sequences, logprobs in zip(scored_parts, old_logprobs, strict=True)
        ]
        return [
            first_update,
            *scored_updates[len(scored_updates) - len(later_updates) :],
            *scored_updates * extra_epochs,
        ]


def _use_teacher_head(item: PendingRows) -> PendingRows:
    """Replace the rollout's head ids by the teacher's, so that the anchor scores the same ids.

    This function waits for the teacher's rows.
    """
    head = torch.from_numpy(item.rows.result().head_ids)
    return PendingRows(replace(cast(Rollout, item.sequence), head_ids=head), item.rows)


def _rollouts_of(pending: Sequence[PendingRows]) -> list[Rollout]:
    return [cast(Rollout, item.sequence) for item in pending]


def prepare(config: RLJob, inputs: Inputs) -> Preparation:
    """Compare the tokenizers of student and teacher, load the prompts, and open the retriever."""
    images = load_prompt_images(config)
    pair, vocab_size = pair_tokenizers(config, inputs)
    assert not isinstance(pair, TokenizerPair), "compare_tokenizers refuses such a pair"
    check_lengths(config, "student", inputs.max_length)
    check_top_k(config.method.top_k, vocab_size, "method.top_k")
    prompts = load_rl_prompts(config, inputs.tokenizer, images, inputs.model_ids)
    check_shares(config.data, config.processes, len(prompts.held_out))
    retriever = None if config.environment is None else make_retriever(config.environment)
    material = RLMaterial(**vars(inputs), prompts=prompts, retriever=retriever, pair=pair)
    return Preparation(
        vocab_size,
        prompts.epoch_size,
        lambda job, *parts: build(job, material, *parts),
        images,
    )


def build(
    config: RLJob,
    material: RLMaterial,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    engine: EngineConnection | None,
) -> Method:
    """Build the method of an RL job. The module docstring lists the steps.

    `engine`: samples the rollouts; None: this process samples. The anchor starts as a copy of the
    student's current weights.
    """
    method, rewards = config.method, material.rewards
    assert (rewards is None) == (config.reward is None), "rewards and config differ"
    rollout_rewards = None if rewards is None else RolloutRewards(rewards, material.tokenizer)
    rollouts = make_rollouts(config, material, student, engine)
    anchor, sources = None, teacher_sources(config, material, student)
    if config.has_anchor:
        tau, period = config.anchor.tau, config.anchor.update_period
        anchor = Anchor(student, tau=tau, update_period=period)
        sources += (anchor_teacher(config, material, anchor, accelerator, student),)
    sources = sources or (NoTeacher(),)
    answers = ScoredRollouts(student, rollouts, sources[0], config.seed)
    critic = None
    if config.has_critic and rollout_rewards is not None:
        critic = CriticAdvantages(accelerator, student, method, config.train.tokens_per_micro_batch)
    objective, old_policy = RLObjective.of(config), None
    if objective.has_policy_gradient:
        max_tokens = config.train.tokens_per_micro_batch
        old_policy = OldPolicy(
            student, temperature=method.temperature, tokens_per_micro_batch=max_tokens
        )
    prompts = material.prompts
    rollouts_ahead = None
    if engine is not None:
        training_rollouts = engine_rollouts(config, material, student, engine)
        rollouts_ahead = engine.rollouts_ahead(config, sources[0], training_rollouts)
    groups = GroupSampler(
        config, accelerator, prompts.training, rollouts_ahead or answers, answers, rollout_rewards
    )
    steps = RLSteps(
        config, accelerator, prompts.held_out, groups, answers, sources, critic, old_policy
    )
    evaluation = Evaluation(
        accelerator,
        DistillationObjective(method.direction, "bucket+sampled", method.temperature),
        list if config.teacher is None else steps.held_out,
        TaskEvaluation(
            prompts.held_out,
            accelerator,
            material.tokenizer,
            make_rollouts(config, material, student, engine, for_evaluation=True),
            use_exact_match=config.is_evaluated,
            rollout_rewards=rollout_rewards,
            samples=_sample_settings(config),
        ),
        tokenizer=material.tokenizer,
        samples=rollouts.in_process,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
    watches: list[Watch] = []
    if config.learns_from_groups:
        watches.append(RewardWatch())
    if anchor is not None:
        watches.append(StabilityWatch(config, anchor))
    return Method(
        objective,
        steps.of_step,
        evaluation,
        anchor,
        critic,
        rollouts_ahead=rollouts_ahead,
        watches=watches,
    )


def _sample_settings(config: RLJob) -> Samples | None:
    """Return the settings for sampling several held-out answers per prompt.

    None if the evaluation uses one greedy answer per prompt.
    """
    if not config.eval.temperature:
        return None
    # Negative, below the numbers of `RLSteps.held_out`: a number fixes the random stream.
    return Samples(config.eval.samples, config.seed, first=-1 - config.eval.prompts)
