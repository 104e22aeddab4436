"""The anchor: the student as it was, of which reinforcement learning must not lose sight (EMA-PG).

    phi <- tau phi + (1 - tau) theta        every `update_period` optimizer updates

phi begins as the student's own weights; tau = 1 leaves it there, the fixed reference of plain GRPO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from protos.rows.codec import RowBlock
from protos.rpc.failpoints import failpoint
from student_trainer.data.batch import NumberedSequence, make_batch, unread
from student_trainer.data.packing import micro_batches
from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence
from student_trainer.parallel.collectives import together
from student_trainer.parallel.sharding import Replicated, Sharded, local, share_of


class Anchor:
    """One more copy, in float32, of the weights that learn, each process with its share of them.

    What is frozen is the student's own: of a student with adapters, only those are copied.
    """

    def __init__(self, student: Replicated | Sharded, *, tau: float, update_period: int) -> None:
        """Of the student as it is now; `tau` in [0, 1]; `update_period`: at least 1."""
        self._student = student
        self._tau = tau
        self._update_period = update_period
        self._learned = {
            name: parameter
            for name, parameter in student.trained.model.named_parameters()
            if parameter.requires_grad
        }
        # float32 as the weights are: in half precision, updates of (1 - tau) times a step are lost.
        self._copies = {name: p.detach().clone() for name, p in self._learned.items()}
        self.updates = 0  # of the student, since it began
        self.version = 0  # updates of the anchor

    def after_update(self) -> None:
        """Once after each update of the student."""
        self.updates += 1
        if self._tau == 1 or self.updates % self._update_period:
            return
        with torch.no_grad():
            for copy, learned in self._pairs():
                # Where the two are the same, so they remain: no rounding adds up.
                copy.lerp_(learned, 1 - self._tau)
        failpoint("anchor-moved")
        self.version += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the student's weights are the anchor's: `student.gathered()` has them, too.

        The values change places, not the tensors: FSDP2 and DDP hold on to those.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def gap(self) -> float:
        """|theta - phi| / |phi|, over all weights that learn; every process must call it."""
        apart, size = self._norms()
        return apart / size if size else 0.0

    def size(self) -> float:
        """|phi|; every process must call it."""
        return self._norms()[1]

    @property
    def elements(self) -> int:
        """Of all weights that learn, in all processes."""
        return sum(copy.numel() for copy in self._copies.values())

    def state(self) -> dict[str, Tensor]:
        """This process's shares, by the names of the weights in the model; not copies."""
        return dict(self._copies)

    def load_state(self, whole: Callable[[str], Tensor], *, updates: int, version: int) -> None:
        """Go on from tensors that `whole` reads by their names, each process with its share.

        One at a time: a process may have room for no more.
        """
        with torch.no_grad():
            for name, copy in self._copies.items():
                local(copy).copy_(local(share_of(whole(name), copy)))
        self.updates, self.version = updates, version

    def instead_of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The student's `weights`, as parameters, with the anchor's in place of those that learn.

        What was one tensor under two names still is.
        """
        by_id = {id(self._learned[name]): copy for name, copy in self._copies.items()}
        return {name: by_id.get(id(weight), weight) for name, weight in weights.items()}

    @torch.no_grad()
    def _norms(self) -> tuple[float, float]:
        """|theta - phi| and |phi|."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._student.device)
        for copy, learned in self._pairs():
            for place, values in enumerate((learned - copy, copy)):
                sums[place] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        apart, size = self._student.total(sums).sqrt().tolist()
        return apart, size

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(anchor, student) of this process's share of each weight."""
        for name, copy in self._copies.items():
            yield local(copy), local(self._learned[name].detach())

    def _swap(self) -> None:
        with torch.no_grad():
            for copy, learned in self._pairs():
                aside = copy.clone()
                copy.copy_(learned)
                learned.copy_(aside)


class AnchorTeacher:
    """The anchor as a TeacherSource: `score` collects rollouts, `finish` computes their rows.

    All rollouts of a step are scored together, because the anchor's weights change places with the
    student's once for all of them, in every process. No gradients.
    """

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
        """`top_k`: of the anchor; None: score at the rollouts' own head ids. `prompt`: the ids that
        the anchor reads in place of a rollout's prompt; None: the same.
        """
        self._anchor = anchor
        self._student = student
        self._accelerator = accelerator
        self._temperature = temperature
        self._most = tokens_per_micro_batch
        self._top_k = top_k
        self._prompt = prompt
        self._pending: list[tuple[Rollout, Future[RowBlock]]] = []

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Resolved by the next `finish`; one row per token of the completion."""
        future: Future[RowBlock] = Future()
        self._pending.append((rollout, future))
        return future

    def finish(self) -> None:
        """Collective, outside `gathered()`: each process scores the rollouts that it collected.

        Raises in every process what `prompt` raises in one.
        """
        pending, self._pending = self._pending, []
        asked = together(
            self._accelerator,
            lambda: [self._asked(number, rollout) for number, (rollout, _) in enumerate(pending)],
        )
        blocks: dict[int, RowBlock] = {}
        packs = self._student.whole.packs
        with self._anchor.in_place(), self._student.gathered():
            self._student.whole.eval()
            for group in micro_batches(asked, self._most, pack=packs):
                blocks |= self._scored(group)
        for number, (_, future) in enumerate(pending):
            future.set_result(blocks[number])

    def _asked(self, number: int, rollout: Rollout) -> NumberedSequence:
        """What the anchor reads in place of the rollout."""
        prompt = rollout.token_ids[: rollout.start]
        if self._prompt is not None:
            prompt = self._prompt(rollout)
        return NumberedSequence(
            # Not a rollout: there are rows of what an environment wrote too, as of any teacher.
            TokenSequence(torch.cat([prompt, rollout.completion]), len(prompt)),
            unread(rollout.head_ids.numpy().astype(np.int32)),
            number,
        )

    def _scored(self, group: Sequence[NumberedSequence]) -> dict[int, RowBlock]:
        whole = self._student.whole
        batch = make_batch(group, self._student.device, pack=whole.packs)
        ids, rows = whole.rows(batch, self._temperature, self._top_k)
        everything = RowBlock(
            ids.int().cpu().numpy(),
            rows.head_logprobs.cpu().numpy(),
            rows.tail_logmass.cpu().numpy(),
            rows.token_logprobs.cpu().numpy(),
        )
        ends = np.cumsum([item.sequence.learned for item in group])
        return {
            item.number: everything.slice(int(end) - item.sequence.learned, int(end))
            for item, end in zip(group, ends, strict=True)
        }
