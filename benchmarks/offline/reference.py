"""Runs the trainer with a reference loss that needs all logits, which no store can provide.

    python -m benchmarks.offline.reference LOSS TEACHER RUN_DIR --attempt N

The trainer, its batches, optimizer, schedule and checkpoints are unchanged. Only the loss is
replaced by one that reads all logits of the student (and of a teacher in the same process):

    exact            KL(teacher||student) over the whole vocabulary: the ceiling of every tail mode
    cross-entropy    -log p of the stored tokens: the data alone, without a teacher
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clients.config.tables.common import StudentConfig
from student_trainer import __main__ as program
from student_trainer import assembly
from student_trainer.data.batch import Batch
from student_trainer.losses import (
    FusedLoss,
    LossFunction,
    entropy_from_logits,
    exact_kl,
    rows_from_logits,
)
from student_trainer.model.loading import load_model
from student_trainer.model.student import Student

LOSSES = ("cross-entropy", "exact")


class Reference(Student):
    """A student that computes the reference loss instead of the job's loss."""

    def __init__(self, model: Any, *, loss: str, teacher: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # Not a submodule: the teacher's weights are not trained and not counted as the student's.
        self._teacher_logits = teacher.forward
        self._loss = loss

    def forward(
        self, batch: Batch, loss_fn: LossFunction, temperature: float, needs_all_rows: bool = False
    ) -> FusedLoss:
        """Compute the reference loss instead of `loss_fn`; the job's rows are for metrics only."""
        logits = batch.select(self.model(**batch.inputs, use_cache=False).logits)
        rows = rows_from_logits(
            logits,
            batch.head_ids,
            batch.token_ids,
            sample_ids=batch.sample_ids,
            temperature=temperature,
        )
        if self._loss == "exact":
            teacher = self._of_teacher(batch)
            values = exact_kl(logits, teacher, direction="forward", temperature=temperature)
        else:
            values = -rows.token_logprobs
        entropy = entropy_from_logits(logits, temperature=temperature)
        return FusedLoss(values.sum(), rows.detach(), {"loss": values.detach(), "entropy": entropy})

    @torch.no_grad()
    def _of_teacher(self, batch: Batch) -> Tensor:
        return batch.select(self._teacher_logits(**batch.inputs, use_cache=False).logits)


def main() -> int:
    loss, teacher, *arguments = sys.argv[1:]
    assert loss in LOSSES
    loaded = load_model(StudentConfig(model=teacher)).eval()
    # Only this class is replaced; everything else is as in `distill run`.
    assembly.Student = partial(Reference, loss=loss, teacher=loaded)  # type: ignore
    sys.argv[1:] = arguments
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
