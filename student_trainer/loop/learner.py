"""The parts of a method that the trainer uses, and the updates of a step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.tables.job import TrainingJob
from protos.errors import Corrupt
from protos.rpc.failpoints import failpoint
from student_trainer.critic import CriticAdvantages
from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.packing import micro_batches
from student_trainer.loop.efficiency import Efficiency
from student_trainer.loop.evaluation import Evaluation
from student_trainer.loop.optimizer import clip_gradients, set_learning_rate
from student_trainer.loop.step import Objective, Steps, compute_means, count_lengths, sum_over_ranks
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.source import PendingRows

log = logging.getLogger(__name__)


class Watch(Protocol):
    """Checks the metrics of each step, and logs a warning if they show a fault."""

    @property
    def note(self) -> str:
        """The text about the fault that the phase of the job shows; "" if there is no fault."""

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of `step`."""


@dataclass(frozen=True)
class Method:
    """The parts of a method that the trainer uses.

    - objective: the loss and the metrics of a micro-batch.
    - steps: a function that returns this process's sequences of a step.
    - evaluation: the evaluation on held-out data.
    - anchor: None if the job has no anchor.
    - critic: None if the job computes advantages without a critic.
    - facts: texts by name that every checkpoint stores in state.json. For example, a resumed
      offline run compares the identity of its store with the stored one.
    - rollouts_ahead: None if the trainer's processes sample the rollouts.
    - watches: the watches of this method. They run in the main process.
    """

    objective: Objective
    steps: Steps
    evaluation: Evaluation
    anchor: Anchor | None = None
    critic: CriticAdvantages | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    rollouts_ahead: RolloutsAhead | None = None
    watches: Sequence[Watch] = ()


@dataclass(frozen=True)
class UpdateSums:
    """The sums of the metrics of an update.

    - sums: (sum, number) of each metric over the sequences of this process, on its device.
    - totals: (sum, number), over all processes, of each metric that the host computes.
    - weight: the sum of the weights of all answers, over all processes.
    """

    sums: Mapping[str, Tensor]
    totals: Mapping[str, tuple[float, float]]
    weight: float

    def read_means(self, accelerator: Accelerator, norm: Tensor) -> dict[str, float]:
        """Collective. Return the mean of each metric over all processes.

        `norm`: the norm of the gradient, a scalar on the device, with the same value in all
        processes. The host waits for the device here, once per update.
        """
        norm_sum = torch.stack([norm, norm.new_ones(())])
        totals = sum_over_ranks(accelerator, {**self.sums, "grad_norm": norm_sum})
        totals["loss"] = (totals["loss"][0], self.weight)
        return compute_means({**totals, **self.totals})

    def list_ranks_not_finite(self, accelerator: Accelerator) -> list[int]:
        """Collective. Return the ranks whose own loss is infinite or NaN."""
        is_finite = self.sums["loss"].isfinite().all().int().reshape(1)
        flags = accelerator.gather(is_finite).tolist()
        return [rank for rank, flag in enumerate(flags) if not flag]


@dataclass(eq=False)
class Learner:
    """Updates the student and then the anchor, if the job has one.

    - skipped_updates: the number of consecutive skipped updates up to now.
    - has_tokens: whether the last gradient contains the loss of at least one token.
    """

    config: TrainingJob
    accelerator: Accelerator
    student: Replicated | Sharded
    optimizer: torch.optim.Optimizer
    method: Method
    efficiency: Efficiency
    skipped_updates: int = 0
    has_tokens: bool = True

    def learn(self, step: int, pending: Sequence[PendingRows], rate: float) -> dict[str, float]:
        """Collective. Run one update of step `step`, and return the metrics of the update.

        `pending`: this process's sequences. `rate`: the learning rate. Raises Corrupt in the same
        case as `update`.
        """
        sums, wait_seconds = self.add_gradients(pending)
        learned_at = time.monotonic()
        failpoint("gradients-ready")
        max_norm = self.config.train.max_grad_norm
        means = sums.read_means(self.accelerator, clip_gradients(self.student, max_norm))
        norm = means["grad_norm"]
        ranks = [] if math.isfinite(norm) else sums.list_ranks_not_finite(self.accelerator)
        self.update(step, rate, norm, ranks)
        is_skipped = self.skipped_updates > 0
        if self.method.anchor is not None and not is_skipped:
            self.method.anchor.after_update()
        seconds = {"time/optim": time.monotonic() - learned_at}
        seconds |= {"time/teacher_wait": wait_seconds} if self.config.teacher_addresses else {}
        return {**means, "grad_norm/skipped": float(is_skipped), **seconds}

    def add_gradients(self, pending: Sequence[PendingRows]) -> tuple[UpdateSums, float]:
        """Collective. Compute the gradients of the mean loss over all processes, and add them up.

        Returns the sums of the metrics, and the seconds that this process waited for rows. The host
        does not read the sums from the device. With a single process, the host does not wait for
        the device at all.
        """
        flops = torch.tensor([self.efficiency.flops(pending), 0], dtype=torch.float64)
        lengths = sum_over_ranks(self.accelerator, {**count_lengths(pending), "flops": flops})
        flops_of_all, weight_sum = lengths.pop("flops")[0], lengths.pop("counted")[0]
        tokens = lengths["length/mean"][0]
        totals = {**lengths, "tokens": (tokens, 1.0), "flops": (flops_of_all, 1.0)}
        # DDP and FSDP average gradients over processes; the loss is divided by the global count.
        scale = self.student.gradient_ranks / max(weight_sum, 1.0)
        layout = self.student.full.layout
        sums: dict[str, Tensor] = {}
        wait_seconds = 0.0
        self.student.trained.train()
        groups = micro_batches(pending, self.config.train.tokens_per_micro_batch, layout)
        own_groups = len(groups)
        # All ranks run the same number of micro-batches: a rank with fewer repeats its last one
        # without rows.
        groups += groups[-1:] * (max_over_ranks(self.accelerator, own_groups) - own_groups)
        for group_number, group in enumerate(groups):
            started_at = time.monotonic()
            scored_sequences = self._wait_for_rows(group)
            wait_seconds += time.monotonic() - started_at
            batch = self.method.objective.batch(scored_sequences, self.student.device, layout)
            if group_number >= own_groups:
                batch = batch.without_rows()
            for group_batch, is_own in self.student.batches_of_group(batch):
                metric_sums = self._add_batch(
                    group_batch, scale, last=group_number == len(groups) - 1
                )
                if is_own:
                    sums = {name: sums.get(name, 0) + value for name, value in metric_sums.items()}
        self.has_tokens = weight_sum > 0
        return UpdateSums(sums, totals, max(weight_sum, 1.0)), wait_seconds

    def _add_batch(self, batch: Batch, scale: float, *, last: bool) -> dict[str, Tensor]:
        """Collective. Compute the loss of a batch.

        Add its gradient, times `scale`, to the gradients. `last`: whether this is the last batch of
        an update; see `Replicated.synchronized`. Returns (sum, number) of each metric.
        """
        objective = self.method.objective
        with self.student.synchronized(is_last=last):
            loss = objective.loss(batch)
            fused_loss = self.student(batch, loss, objective.temperature, objective.needs_all_rows)
            self.accelerator.backward(fused_loss.loss_sum * scale)
        metric_sums = objective.metrics(batch, fused_loss)
        return metric_sums | {
            "loss": torch.stack([fused_loss.loss_sum.detach(), fused_loss.loss_sum.new_zeros(())])
        }

    def _wait_for_rows(self, group: list[PendingRows]) -> list[ScoredSequence]:
        """Collective. Wait for the rows of this process's micro-batch, and return its scored
        sequences.

        An error of one rank is raised on all ranks.
        """
        return raise_on_all_ranks(self.accelerator, lambda: [item.wait() for item in group])

    def update(self, step: int, rate: float, norm: float, ranks: Sequence[int] = ()) -> None:
        """Update the weights, or skip the update.

        - norm: the norm of the gradient before clipping.
        - ranks: the ranks whose loss is infinite or NaN, for the error message.

        All ranks skip the update if the gradient is not finite. They also skip it if no token is
        learned, because all tokens are masked or have weight 0. In RL, an update with a zero
        gradient is not skipped, because all rewards of a group may be equal. Raises Corrupt after
        more than `train.max_skipped_updates` consecutive skipped updates.
        """
        set_learning_rate(self.optimizer, rate)
        is_finite = math.isfinite(norm)
        learns = self.has_tokens and (norm > 0 or self.config.learns_from_zero)
        is_skipped = not (is_finite and learns)
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.skipped_updates = self.skipped_updates + 1 if is_skipped else 0
        problem, field = "the gradient is zero: no token is learned", "data.path"
        remedy = "check masks and weights: distill preview shows which tokens are learned"
        if not is_finite:
            problem, field = "the gradient is not finite", "train.learning_rate"
            if ranks and self.accelerator.num_processes > 1:
                problem += f": the loss is not finite on rank {', '.join(map(str, ranks))}"
            remedy = "submit a new job with a lower learning rate"
        if self.skipped_updates > self.config.train.max_skipped_updates:
            raise Corrupt(
                f"step {step}: {problem}; {self.skipped_updates} consecutive updates were skipped",
                field=field,
                hint=remedy,
            )
        if is_skipped and self.accelerator.is_main_process:
            log.warning("step %d: %s; update skipped", step, problem)
