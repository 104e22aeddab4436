"""The interface of a method, and the parts that more than one method builds.

Each method file (`on_policy.py`, `offline.py`, `rl.py`, `sft.py`) builds one `Method` from a job.
The trainer (`loop/trainer.py`) runs it without knowing which method it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from clients.config.kinds import AnyTraining, SamplingJob
from student_trainer.critic import CriticAdvantages
from student_trainer.data.prompts import Prompt
from student_trainer.loop.evaluation import Evaluation, HeldOutObjective, TaskEvaluation
from student_trainer.loop.step import Objective, Steps
from student_trainer.model.loading import computes_in_bfloat16
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.order import SamplingSettings
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.source import PendingRows


@dataclass(frozen=True)
class Method:
    """What the trainer needs from a method.

    objective: the loss and the metrics of a micro-batch. steps: returns this process's sequences of
    a step. evaluation: the held-out evaluation. anchor: None if the job has no anchor. critic: None
    if advantages come from groups. facts: written to state.json of every checkpoint; an offline job
    compares the identity of its store with them when the run resumes. rollouts_ahead: None if the
    trainer's processes sample.
    """

    objective: Objective
    steps: Steps
    evaluation: Evaluation
    anchor: Anchor | None = None
    critic: CriticAdvantages | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    rollouts_ahead: RolloutsAhead | None = None


def sampling_settings(
    config: SamplingJob, *, top_k: int, temperature: float, draws: int, vocab_size: int
) -> SamplingSettings:
    """Return the settings of training rollouts; the options are those of `plain_rollouts`."""
    return SamplingSettings(
        top_k=top_k,
        temperature=temperature,
        draws=draws,
        seed=config.seed,
        stream_tokens=config.method.max_new_tokens,
        batch_tokens=sampling_batch(config),
        vocab_size=vocab_size,
    )


def sampling_batch(config: AnyTraining) -> int:
    """Return the maximum number of tokens of a sampling batch, including padding.

    Sampling stores no activations, so its batches can be larger than those of training.
    """
    return 4 * config.train.tokens_per_micro_batch


def plain_rollouts(
    config: AnyTraining,
    student: Replicated | Sharded,
    tokenizer: Any,
    *,
    top_k: int,
    temperature: float,
    draws: int = 0,
    vocab_size: int | None = None,
) -> HuggingFaceRollouts:
    """Return the sampler of single-turn rollouts of the student.

    `top_k`: head ids to record for each sampled token; 0 records none. `draws`: ids to draw from
    the tail of each token. `vocab_size`: sample from the first `vocab_size` ids; None: from all.
    """
    return HuggingFaceRollouts(
        student.full.model,
        tokenizer,
        top_k=top_k,
        temperature=temperature,
        draws=draws,
        vocab_size=vocab_size,
        max_new_tokens=config.method.max_new_tokens,
        batch_tokens=sampling_batch(config),
        bf16=computes_in_bfloat16(config.student),
        never=student.full.placeholder,
        equal_lengths=student.full.equal_lengths,
    )


def held_out_evaluation(
    config: AnyTraining,
    accelerator: Accelerator,
    objective: HeldOutObjective,
    read_held_out: Callable[[], list[PendingRows]],
    task_prompts: list[Prompt],
    tokenizer: Any,
    rollouts: Rollouts,
    *,
    is_stored: bool,
) -> Evaluation:
    """Return the held-out evaluation of a job without rewards.

    `read_held_out`: returns this process's sequences with their rows. `is_stored`: whether they are
    stored, not sampled. `task_prompts`: the prompts for exact match, of all processes; an empty
    list disables exact match.
    """
    return Evaluation(
        accelerator,
        objective,
        read_held_out,
        TaskEvaluation(task_prompts, accelerator, tokenizer, rollouts) if task_prompts else None,
        samples=rollouts.in_process and not (is_stored and not task_prompts),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
