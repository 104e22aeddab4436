"""What a method gives the trainer, and the parts that several methods build alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from clients.config.kinds import AnyTraining
from student_trainer.critic.advantages import CriticAdvantages
from student_trainer.data.prompts import Prompt
from student_trainer.loop.evaluation import Evaluation, TaskEvaluation
from student_trainer.loop.step import Objective, Steps
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.hf import HuggingFaceRollouts
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.source import PendingRows


@dataclass(frozen=True)
class Method:
    """What a method gives the trainer: see `on_policy.py`, `offline.py` and `rl.py`.

    `facts` are saved with every checkpoint; a resumed job must have the same ones.
    """

    objective: Objective
    steps: Steps
    evaluation: Evaluation
    anchor: Anchor | None = None
    values: CriticAdvantages | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def plain_rollouts(
    config: AnyTraining,
    student: Replicated | Sharded,
    tokenizer: Any,
    *,
    top_k: int,
    temperature: float,
) -> HuggingFaceRollouts:
    return HuggingFaceRollouts(
        student.whole.model,
        tokenizer,
        top_k=top_k,
        temperature=temperature,
        max_new_tokens=config.method.max_new_tokens,
        # Sampling keeps no activations: it can take larger batches than training.
        batch_tokens=4 * config.train.tokens_per_micro_batch,
        bf16=config.student.dtype == "bfloat16",
    )


def kl_evaluation(
    config: AnyTraining,
    accelerator: Accelerator,
    objective: DistillationObjective,
    held_out: Callable[[], list[PendingRows]],
    examined: list[Prompt],
    tokenizer: Any,
    rollouts: HuggingFaceRollouts,
) -> Evaluation:
    return Evaluation(
        accelerator,
        objective,
        held_out,
        TaskEvaluation(examined, accelerator, tokenizer, rollouts) if examined else None,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
