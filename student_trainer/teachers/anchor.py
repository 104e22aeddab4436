"""The anchor of RL: an exponential moving average (EMA) of the student's weights.

    phi <- tau phi + (1 - tau) theta        every `update_period` optimizer updates

theta is the student, phi the anchor, which starts as a copy of the student. With tau = 1, the
anchor is the fixed reference model of plain GRPO. See EMA-PG (arXiv 2602.04417).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from protos.rows.codec import RowBlock
from protos.rpc.failpoints import failpoint
from student_trainer.data.batch import Batch, NumberedSequence, make_batch, placeholder_rows
from student_trainer.data.packing import group_in_request_order
from student_trainer.data.sequence import Rollout, TokenSequence
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.passes import run_passes
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import local


class Anchor:
    """The anchor: a float32 copy of the student's trainable weights, sharded like the student.

    The frozen weights are those of the student, without a copy. With LoRA, the anchor therefore
    consists only of adapters.
    """

    def __init__(self, student: Replicated | Sharded, *, tau: float, update_period: int) -> None:
        """Copy the current weights of the student.

        `tau`: the decay of the average, in [0, 1]. `update_period`: the number of updates of the
        student between two updates of the anchor, at least 1.
        """
        self._student = student
        self._tau = tau
        self._update_period = update_period
        self._parameters = {
            name: parameter
            for name, parameter in student.trained.model.named_parameters()
            if parameter.requires_grad
        }
        # float32, like the student's: half precision would round off updates of (1 - tau) a step.
        self._copies = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        self.updates = 0  # updates of the student since the start of the run
        self.version = 0  # updates of the anchor

    def after_update(self) -> None:
        """Count an update of the student. At the end of a period, update the anchor.

        Call this method once after each optimizer update, on every process. It needs no
        communication.
        """
        self.updates += 1
        if self._tau == 1 or self.updates % self._update_period:
            return
        with torch.no_grad():
            for copy, weight in self._all_local_shards():
                # lerp_ leaves equal values exactly equal, so rounding errors do not add up.
                copy.lerp_(weight, 1 - self._tau)
        failpoint("anchor-moved")
        self.version += 1

    @contextmanager
    def in_student_place(self) -> Iterator[None]:
        """Context in which the student has the weights of the anchor.

        This includes passes and `gathered()`. All processes must enter and leave the context
        together. The values of the tensors are swapped, not the tensors, because DDP and FSDP2
        refer to the student's tensors.
        """
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    def gap(self) -> float:
        """Collective. Return |theta - phi| / |phi| over all trainable weights; 0 if |phi| is 0.

        theta is the student and phi is the anchor.
        """
        distance, size = self._compute_norms()
        return distance / size if size else 0.0

    def size(self) -> float:
        """Collective. Return the Euclidean norm of all weights of the anchor."""
        return self._compute_norms()[1]

    @property
    def elements(self) -> int:
        """The number of trainable weights, over all processes."""
        return sum(copy.numel() for copy in self._copies.values())

    def state(self) -> dict[str, Tensor]:
        """Return this process's shards of the anchor by parameter name.

        The tensors are not copies.
        """
        return dict(self._copies)

    def load_state(
        self, read_rows: Callable[[str, Tensor], Tensor], *, updates: int, version: int
    ) -> None:
        """Load this process's shards of the anchor from a checkpoint.

        - read_rows: gets the name of a stored tensor and this process's shard of the anchor, and
          returns the stored values of this shard.
        - updates: the number of updates of the student.
        - version: the number of updates of the anchor.
        """
        with torch.no_grad():
            for name, copy in self._copies.items():
                local(copy).copy_(read_rows(name, copy))
        self.updates, self.version = updates, version

    def with_anchor_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `weights` in which the anchor's weights replace the trainable weights of the
        student.

        `weights`: parameters of the student by name. A tied weight, which has two names, is
        replaced by a single tensor under both names.
        """
        by_id = {id(self._parameters[name]): copy for name, copy in self._copies.items()}
        return {name: by_id.get(id(weight), weight) for name, weight in weights.items()}

    @torch.no_grad()
    def _compute_norms(self) -> tuple[float, float]:
        """Collective. Return |theta - phi| and |phi|, where theta is the student and phi the
        anchor.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._student.device)
        names = [name for name, copy in self._copies.items() if self._student.counts_share_of(copy)]
        for copy, weight in map(self._local_shards, names):
            for index, values in enumerate((weight - copy, copy)):
                sums[index] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        distance, size = self._student.sum_over_shards(sums).sqrt().tolist()
        return distance, size

    def _all_local_shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (anchor's shard, student's shard) of this process for each trainable weight."""
        return map(self._local_shards, self._copies)

    def _local_shards(self, name: str) -> tuple[Tensor, Tensor]:
        """Return (anchor's shard, student's shard) of this process for one weight."""
        return local(self._copies[name]), local(self._parameters[name].detach())

    def _swap_weights(self) -> None:
        with torch.no_grad():
            for copy, weight in self._all_local_shards():
                saved_copy = copy.clone()
                copy.copy_(weight)
                weight.copy_(saved_copy)


class AnchorTeacher:
    """The anchor as a TeacherSource. `score` only stores a rollout; `finish` computes all rows.

    All rollouts of a step are scored in one call of `finish`, so the weights of anchor and student
    are swapped only once per step. No gradients are computed.
    """

    any_time = False

    def __init__(
        self,
        anchor: Anchor,
        student: Replicated | Sharded,
        accelerator: Accelerator,
        *,
        temperature: float,
        tokens_per_micro_batch: int,
        top_k: int | None = None,
        prompt: Callable[[Rollout], Tensor] | None = None,
    ) -> None:
        """Store the settings of the rows.

        - temperature: divides the logits of the anchor.
        - top_k: compute rows at the `top_k` most likely ids of the anchor; None: at the head ids of
          the rollouts.
        - prompt: returns the prompt ids [P] that the anchor reads for a rollout; None: the anchor
          reads the prompt of the rollout.
        """
        self._anchor = anchor
        self._student = student
        self._accelerator = accelerator
        self._temperature = temperature
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._top_k = top_k
        self._prompt = prompt
        self._pending: list[tuple[Rollout, Future[RowBlock]]] = []

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request one row per token of the completion. The next `finish` computes the rows."""
        future: Future[RowBlock] = Future()
        self._pending.append((rollout, future))
        return future

    def finish(self) -> None:
        """Collective. Compute the rows of all rollouts that `score` has stored in this process.

        Call this method outside `student.gathered()`. If `prompt` raises a DistillError on one
        rank, the error is raised on all ranks.
        """
        pending, self._pending = self._pending, []
        sequences = raise_on_all_ranks(
            self._accelerator,
            lambda: [
                self._build_sequence(number, rollout) for number, (rollout, _) in enumerate(pending)
            ],
        )
        student = self._student
        layout = student.trained.layout
        groups = list(group_in_request_order(sequences, self._tokens_per_micro_batch, layout))
        batch_of = partial(make_batch, device=student.device, layout=layout)
        student.trained.eval()
        with self._anchor.in_student_place():
            row_blocks = run_passes(student, groups, batch_of, self._compute_rows)
        blocks: dict[int, RowBlock] = {}
        for group, batch_rows in zip(groups, row_blocks, strict=True):
            ends = np.cumsum([item.sequence.learned for item in group])
            blocks |= {
                item.number: batch_rows.slice(int(end) - item.sequence.learned, int(end))
                for item, end in zip(group, ends, strict=True)
            }
        for number, (_, future) in enumerate(pending):
            future.set_result(blocks[number])

    def _build_sequence(self, number: int, rollout: Rollout) -> NumberedSequence:
        """Return the sequence that the anchor reads: the anchor's prompt, and the rollout's
        completion.
        """
        prompt = rollout.token_ids[: rollout.start]
        if self._prompt is not None:
            prompt = self._prompt(rollout)
        return NumberedSequence(
            # A TokenSequence has rows for the environment's tokens too, like any teacher's rows.
            TokenSequence(
                torch.cat([prompt, rollout.completion]), len(prompt), images=rollout.images
            ),
            placeholder_rows(
                rollout.head_ids.numpy(),
                None if rollout.draws is None else rollout.draws.ids.numpy(),
            ),
            number,
        )

    def _compute_rows(self, batch: Batch) -> RowBlock:
        ids, rows = self._student.rows(batch, self._temperature, self._top_k)
        return RowBlock(
            ids.int().cpu().numpy(),
            rows.head_logprobs.cpu().numpy(),
            rows.tail_logmass.cpu().numpy(),
            rows.token_logprobs.cpu().numpy(),
            draw_logprobs=(
                None if rows.sample_logprobs is None else rows.sample_logprobs.cpu().numpy()
            ),
        )
