"""The log-probs of sampled tokens under the student before an update, in the trainer's arithmetic.

PPO's ratio compares the student with the student before the first update of a step. The log-probs
that the sampler recorded cannot replace these: in bfloat16 two programs compute different log-probs
with the same weights, and the ratios of full answers would exceed the clips of GSPO.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from student_trainer.data.batch import Batch
from student_trainer.data.rollout import Rollout
from student_trainer.parallel.passes import run_passes_over_rollouts
from student_trainer.parallel.sharding import Replicated, Sharded


class OldPolicy:
    """Computes log-probs with the student's current weights, one forward pass per micro-batch."""

    def __init__(
        self, student: Replicated | Sharded, *, temperature: float, tokens_per_micro_batch: int
    ) -> None:
        self._student = student
        self._temperature = temperature
        self._tokens_per_micro_batch = tokens_per_micro_batch

    def __call__(self, updates: Sequence[Sequence[Rollout]]) -> list[list[Tensor]]:
        """Collective. Return log-probs [learned] float32 on the CPU for each rollout, in nats.

        `updates`: the rollouts of each update. Each update has micro-batches of its own, as in the
        trainer: other micro-batches would round differently. Call it outside `student.gathered()`.
        """
        student = self._student

        def logprobs(batch: Batch) -> Tensor:
            return student.rows(batch, self._temperature)[1].token_logprobs.cpu()

        student.trained.train()  # as in the update
        logprobs_of_updates = [
            run_passes_over_rollouts(
                student, rollouts, logprobs, tokens_per_micro_batch=self._tokens_per_micro_batch
            )
            for rollouts in updates
        ]
        student.trained.eval()
        return logprobs_of_updates
