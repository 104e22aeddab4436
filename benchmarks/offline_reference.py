"""python -m benchmarks.offline_reference LOSS TEACHER RUN_DIR --attempt N: what no store can give.

The trainer itself, program and all, with the same batches, optimizer, schedule and checkpoints;
only the loss is another one, and it reads all logits of the student (and of a teacher that is
loaded into this process):

    exact            KL(teacher||student) over the whole vocabulary: the ceiling of every tail mode
    cross-entropy    -log p of the stored tokens: the data alone, no teacher
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clients.config.common import StudentConfig
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
    """A student whose loss is not the job's."""

    def __init__(self, model: Any, *, loss: str, teacher: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # Not a module of this one: its weights neither learn nor count as ours.
        self._teacher_logits = teacher.forward
        self._loss = loss

    def forward(
        self, batch: Batch, loss_fn: LossFunction, temperature: float, of_all_rows: bool = False
    ) -> FusedLoss:
        """In place of `loss_fn`; the rows of the job are only told in the metrics."""
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
    # The one thing that is replaced: all else is what `distill run` starts.
    assembly.Student = partial(Reference, loss=loss, teacher=loaded)  # type: ignore
    sys.argv[1:] = arguments
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
