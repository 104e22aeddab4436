"""Supervised fine-tuning: the student learns the reference answers of the data, without a teacher.

One step, in order:

1. Examples. `load_examples` (`data/examples.py`) reads the records: a prompt and an answer, or a
   conversation. `PromptSet.of_step` (`data/prompts.py`) selects `train.prompts_per_step` of them by
   the seed and the step number, and tokenizes them. Each of n processes takes every n-th example,
   starting at its rank. Sequences longer than `method.max_tokens`, and records without an answer,
   are left out and counted. They are not truncated, because a truncated answer would teach the
   student to stop anywhere.
2. Learned tokens. `Example.sequence` marks the tokens of the answer, with its end token. With
   `method.train_on = "all"`, it marks the tokens of every assistant message. The student reads
   prompt tokens and does not learn them. `Example` -> `TokenSequence` (`data/sequence.py`) ->
   `PendingRows` (`teachers/source.py`), whose rows are placeholders, because there is no teacher.
3. Micro-batches. The learner (`loop/learner.py`) groups the sequences (`data/packing.py`), several
   per line if the model allows it, and makes the tensors of a group (`ScoredSequence` -> `Batch`,
   both in `data/batch.py`).
4. Loss. `CrossEntropyObjective` (`objectives/cross_entropy.py`) computes -log p of each learned
   token (`model/student.py`, which calls `losses/fused/linear_loss.py`), times `data.weight_column`
   if it is set.
5. Update. The trainer divides by the number of learned tokens of all processes, clips the gradient
   and runs AdamW.

`prepare` reads and checks the data that the job needs, and `build` connects these parts.
`assembly.py` calls both once when an attempt starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator

from clients.config.sft import SFTJob
from clients.preflight.limits import check_room
from student_trainer.data.batch import placeholder_rows
from student_trainer.data.examples import Example, load_examples
from student_trainer.data.prompts import ItemsOfSteps
from student_trainer.loop.learner import Method
from student_trainer.loop.step import one_update
from student_trainer.methods.preparation import (
    Inputs,
    Preparation,
    check_shares,
    held_out_evaluation,
    plain_rollouts,
    sampling_settings,
)
from student_trainer.objectives.cross_entropy import CrossEntropyObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.run.model_checks import check_max_tokens
from student_trainer.teachers.source import PendingRows, resolved


class SFTSteps:
    """Returns the sequences of each step, with the reference answers of the data.

    They depend only on the seed and the step number.
    """

    def __init__(
        self,
        config: SFTJob,
        accelerator: Accelerator,
        examples: ItemsOfSteps[Example],
        held_out: Sequence[Example],
    ) -> None:
        """`held_out`: the held-out examples of all processes; this process uses its share."""
        self._examples = examples
        self._per_step = config.sequences_per_step
        self._own_share = slice(accelerator.process_index, None, accelerator.num_processes)
        self._held_out = held_out[self._own_share]

    def of_step(self, step: int) -> list[PendingRows]:
        """Return this process's sequences of `step` (from 1)."""
        return [
            make_pending(example)
            for example in self._examples.of_step(step, self._per_step)[self._own_share]
        ]

    def held_out(self) -> list[PendingRows]:
        """Return this process's held-out sequences. They are the same at every call."""
        return [make_pending(example) for example in self._held_out]


def make_pending(example: Example) -> PendingRows:
    """Return the sequence of an example with placeholder rows, because there is no teacher.

    The placeholder rows have no head ids.
    """
    sequence = example.sequence
    rows = placeholder_rows(np.zeros((sequence.learned, 0), np.int32))
    return PendingRows(sequence, resolved(rows))


def prepare(config: SFTJob, inputs: Inputs) -> Preparation:
    """Load the examples, and check that the student can read sequences of their length."""
    check_max_tokens(config.method.max_tokens, inputs.max_length)
    examples = load_examples(config, inputs.tokenizer, inputs.model_ids)
    held_out = examples[1]
    check_shares(config.data, config.processes, len(held_out))
    if config.is_evaluated:
        longest = max(len(example.prompt.ids) for example in held_out)
        answer, remedy = config.method.max_new_tokens, "set method.max_tokens to at most"
        check_room(longest, answer, "student", inputs.max_length, remedy)
    return Preparation(
        inputs.width,
        examples[0].epoch_size,
        lambda job, accelerator, student, _: build(
            job, inputs.tokenizer, examples, accelerator, student
        ),
    )


def build(
    config: SFTJob,
    tokenizer: Any,
    examples: tuple[ItemsOfSteps[Example], list[Example]],
    accelerator: Accelerator,
    student: Replicated | Sharded,
) -> Method:
    """Build the method of a fine-tuning job. The module docstring lists the steps.

    `examples`: the training examples and the held-out examples. If the job enables exact match, the
    prompts of the held-out examples are also used for it.
    """
    training, held_out = examples
    objective = CrossEntropyObjective()
    steps = SFTSteps(config, accelerator, training, held_out)
    prompts = [example.prompt for example in held_out]
    settings = sampling_settings(config, student, top_k=0, temperature=1.0)
    rollouts = plain_rollouts(config, student, tokenizer, settings)
    evaluation = held_out_evaluation(
        config,
        accelerator,
        objective,
        steps.held_out,
        prompts,
        tokenizer,
        rollouts,
    )
    return Method(objective, one_update(steps.of_step), evaluation)
