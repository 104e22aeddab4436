"""The log-probs of sampled tokens under the student before an update, in the trainer's arithmetic.

PPO's ratio compares the student with itself before the first update of a step. The log-probs that
the sampler recorded are not those: in bfloat16 two programs give the same weights other log-probs,
and the ratios of answers pass the clips of GSPO.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from student_trainer.data.batch import NumberedSequence, make_batch, placeholder_rows
from student_trainer.data.packing import micro_batches
from student_trainer.data.rollout import Rollout
from student_trainer.parallel.sharding import Replicated, Sharded


class OldPolicy:
    """Computes log-probs with the student's current weights, one forward pass per micro-batch."""

    def __init__(
        self, student: Replicated | Sharded, *, temperature: float, tokens_per_micro_batch: int
    ) -> None:
        self._student = student
        self._temperature = temperature
        self._most = tokens_per_micro_batch

    @torch.no_grad()
    def __call__(self, updates: Sequence[Sequence[Rollout]]) -> list[list[Tensor]]:
        """Collective. Return log-probs [learned] float32 on the CPU for each rollout, in nats.

        `updates`: the rollouts of each update. They are grouped as the trainer groups them for the
        update, because other micro-batches would round differently. Call it outside
        `student.gathered()`.
        """
        with self._student.gathered():
            self._student.full.train()  # as in the update
            found = [self._of_update(rollouts) for rollouts in updates]
            self._student.full.eval()
        return found

    def _of_update(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        asked = [
            NumberedSequence(one, placeholder_rows(np.zeros((one.learned, 1), np.int32)), number)
            for number, one in enumerate(rollouts)
        ]
        found: dict[int, Tensor] = {}
        student = self._student.full
        for group in micro_batches(asked, self._most, pack=student.packs):
            batch = make_batch(group, self._student.device, pack=student.packs)
            _, rows = student.rows(batch, self._temperature)
            lengths = [item.sequence.learned for item in group]
            parts = torch.split(rows.token_logprobs.cpu(), lengths)
            found |= {item.number: part for item, part in zip(group, parts, strict=True)}
        return [found[number] for number in range(len(rollouts))]
