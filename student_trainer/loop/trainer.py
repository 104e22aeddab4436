"""The training loop.

A step is a pure function of (weights, optimizer state, anchor, critic, seed, step number) and, with
`rollouts.lag`, of rollouts that earlier weights sampled. A checkpoint contains all of these, so a
killed and resumed run is bit-identical to an uninterrupted one; only the count of consecutive
skipped updates, which ends a run, restarts. A step has one optimizer update; in RL
`method.updates_per_step` in each of `method.epochs_per_step` epochs.

For each step the trainer gets the sequences from the method (`steps`), splits them into
micro-batches, waits for the teacher's rows of one micro-batch at a time, adds up the gradients, and
updates the student, then the anchor. It saves, evaluates and logs at the job's intervals.

The state of a step is copied for its checkpoint before the step is evaluated, so that a failed
evaluation loses no step. The checkpoint then contains the metrics of its step. If metrics.jsonl
lacks the line of that step, an attempt that resumes repeats the evaluation and writes the line.
Checkpoints are written while training goes on (`saver.py`), the last one before the run ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from clients.config.kinds import AnyTraining
from clients.config.rl import RLJob
from clients.runs.best_step import best_step, warn_of_chance
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.metrics_file import MetricsLog, read_points
from clients.runs.progress import Progress
from protos.errors import Corrupt, DistillError, InvalidInput, WrongState
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints.checkpoint import collect_contents, delete_old
from student_trainer.checkpoints.copies import RunCopies
from student_trainer.checkpoints.export import export_model
from student_trainer.checkpoints.model_directory import collect_small_files
from student_trainer.checkpoints.saver import Saver
from student_trainer.critic import CriticAdvantages
from student_trainer.data.batch import Batch, ScoredSequence
from student_trainer.data.packing import micro_batches
from student_trainer.loop.efficiency import Efficiency
from student_trainer.loop.evaluation import Evaluation, write_samples
from student_trainer.loop.optimizer import learning_rate, set_learning_rate, warn_of_schedule
from student_trainer.loop.step import Objective, Steps
from student_trainer.loop.step_metrics import (
    combine_updates,
    compute_means,
    count_lengths,
    sum_over_ranks,
)
from student_trainer.loop.watches import (
    HeadWatch,
    LearningWatch,
    RewardWatch,
    StabilityWatch,
    learns_from_a_head,
    learns_from_groups,
)
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.parallel.gradients import clip_gradients
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.parallel.shards import local
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.teachers.anchor import Anchor
from student_trainer.teachers.source import PendingRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """Everything a trainer works with. `assembly.py` builds it from a job."""

    step: int  # the last finished step; 0 for a new run
    accelerator: Accelerator
    student: Replicated | Sharded
    optimizer: torch.optim.Optimizer
    tokenizer: Any
    objective: Objective
    steps: Steps
    evaluation: Evaluation
    copies: RunCopies
    metrics: MetricsLog | None  # only in the main process
    anchor: Anchor | None = None
    critic: CriticAdvantages | None = None
    facts: Mapping[str, str] = field(default_factory=dict)  # saved in every checkpoint
    # Metrics of `step`, if its checkpoint has them.
    resumed_metrics: Mapping[str, float] | None = None
    rollouts_ahead: RolloutsAhead | None = None


class Trainer:
    """Runs the steps of a job from the last finished one to the verdict."""

    def __init__(
        self, config: AnyTraining, run: RunDirectory, progress: Progress, parts: Parts
    ) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self._step = self._saved_step = parts.step
        self._accelerator = parts.accelerator
        self._student = parts.student
        self._optimizer = parts.optimizer
        self._tokenizer = parts.tokenizer
        self._objective = parts.objective
        self._steps = parts.steps
        self._evaluation = parts.evaluation
        self._copies = parts.copies
        self._metrics = parts.metrics
        self._anchor = parts.anchor
        self._critic = parts.critic
        self._resumed_metrics = parts.resumed_metrics
        self._rollouts_ahead = parts.rollouts_ahead
        processes = parts.accelerator.num_processes
        self._efficiency = Efficiency(parts.student.trained, parts.student.device, processes)
        main = parts.accelerator.is_main_process
        self._saver = Saver(
            parts.accelerator,
            run.checkpoints,
            small_files=collect_small_files(self._student.trained.model, parts.tokenizer)
            if main
            else {},
            facts=parts.facts,
            before_publication=self._metrics.sync if self._metrics is not None else lambda: None,
            after_publication=self._delete_old,
        )
        # Consecutive skipped updates, up to the last one.
        self._skipped_updates = 0
        self._has_tokens = True  # of the gradients
        self._reward_watch, self._learning_watch = RewardWatch(), LearningWatch(config)
        self._watches: list[HeadWatch | StabilityWatch | RewardWatch | LearningWatch]
        self._watches = [self._learning_watch]
        if learns_from_groups(config):
            self._watches.append(self._reward_watch)
        if isinstance(config, RLJob) and parts.anchor is not None:
            self._watches.append(StabilityWatch(config, parts.anchor))
        if learns_from_a_head(config):
            self._watches.append(HeadWatch(read_points(run.metrics)))

    def train(self) -> Verdict:
        """Collective. Train to `max_steps`, then export the model; return the verdict.

        Returns "succeeded", or "cancelled" if a stop of the run was requested. If an evaluation
        raises a DistillError, or a step raises one before it changes a weight, saves a checkpoint
        of the last finished step and then raises the error. All checkpoints are complete then.
        """
        try:
            return self._train()
        finally:
            if self._rollouts_ahead is not None:
                self._rollouts_ahead.close()
            self._saver.close()
            self._copies.close()
            if self._metrics is not None:
                self._metrics.close()

    def _train(self) -> Verdict:
        config = self._config
        if self._metrics is not None:
            warn_of_schedule(config.train, config.max_steps, read_points(self._run.metrics))
        if self._step == 0:
            metrics = self._evaluate()
            _require_finite(metrics)
            self._log(metrics)
        elif self._resumed_metrics is not None and self._is_unlogged():
            self._evaluate_and_log(self._resumed_metrics)
        while self._step < config.max_steps:
            stop = self._progress.stop_wanted()
            if stop:
                if stop == "checkpoint":
                    self._save()
                self._finish_saving()
                self._copies.finish(self._step, hurry=True)
                return "cancelled"
            metrics = self._train_or_save(self._step + 1)
            failpoint("step-done")
            self._step += 1
            self._saver.poll()
            if self._accelerator.is_main_process:  # one process is enough to log the warnings
                for watch in self._watches:
                    watch.see(self._step, metrics)
            if self._is_due(config.checkpoint.every):
                self._save(metrics)
            self._evaluate_and_log(metrics)
        self._require_an_update()
        self._finish_saving()
        self._export()
        if self._metrics is not None:
            warn_of_chance(self._run)
        return "succeeded"

    def _require_an_update(self) -> None:
        """Collective. Raise Corrupt if every update of the run was skipped."""
        points = read_points(self._run.metrics) if self._metrics is not None else []
        skipped = [
            point.metrics["grad_norm/skipped"]
            for point in points
            if "grad_norm/skipped" in point.metrics
        ]
        is_unchanged = bool(skipped) and min(skipped) == 1
        if max_over_ranks(self._accelerator, int(is_unchanged)):
            raise Corrupt(
                "every update of the run was skipped, so nothing was learned",
                field="data.path",
                hint="check the data, the rewards and the student; distill preview shows which"
                " tokens are learned",
            )

    def _is_due(self, interval: int) -> bool:
        return self._step == self._config.max_steps or self._step % interval == 0

    def _is_unlogged(self) -> bool:
        """Collective. Return whether metrics.jsonl lacks the line of the last finished step."""
        logged_steps = (point.step for point in read_points(self._run.metrics))
        is_unlogged = self._metrics is not None and self._step not in logged_steps
        return bool(max_over_ranks(self._accelerator, int(is_unlogged)))

    def _evaluate_and_log(self, metrics: Mapping[str, float]) -> None:
        """Collective. Evaluate the last finished step if it is due, and write its line."""
        if not self._is_due(self._config.eval.every):
            self._log(metrics)
            return
        try:
            eval_metrics = self._evaluate()
        except WrongState:  # in the main process only: a newer attempt has taken over the run
            raise
        except DistillError:
            self._save(metrics)
            self._finish_saving()
            raise
        self._log({**metrics, **eval_metrics})
        if self._saved_step == self._step and not self._saver.is_writing:
            self._delete_old()  # the evaluation may have found a new best checkpoint

    def _train_or_save(self, step: int) -> dict[str, float]:
        self._is_within_step = False
        try:
            return self._train_step(step)
        except DistillError:
            # No rank has changed a weight since the last finished step, so that step can be saved.
            if not self._is_within_step:
                self._save()
            self._finish_saving()
            raise

    def _train_step(self, step: int) -> dict[str, float]:
        started_at = time.monotonic()
        self._efficiency.begin()
        step_share = self._steps(step)
        if self._rollouts_ahead is not None:
            self._rollouts_ahead.before_learning()
        self._is_within_step = self._critic is not None  # `steps` has already updated the critic
        rollouts_at = time.monotonic()
        rate = learning_rate(self._config.train, step, self._config.max_steps)
        updates = []
        for pending in step_share.updates:
            updates.append(self._learn_and_update(pending, rate))
            self._is_within_step = True
        ended_at = time.monotonic()
        step_metrics = (
            compute_means(sum_over_ranks(self._accelerator, step_share.metric_sums))
            if step_share.metric_sums
            else {}
        )
        means = combine_updates(updates)
        speed = means["tokens"] / (ended_at - started_at)
        learning = ended_at - rollouts_at - means.get("time/teacher_wait", 0.0)
        flops = means.pop("flops")
        efficiency = self._efficiency.of_step(flops=flops, learning=learning, speed=speed)
        return {
            **means,
            **step_metrics,
            **self._measure_anchor(),
            "lr": rate,
            "tokens_per_sec": speed,
            **efficiency,
            "time/step": ended_at - started_at,
            "time/rollout": rollouts_at - started_at - sum(step_share.seconds.values()),
            **step_share.seconds,
        }

    def _learn_and_update(self, pending: Sequence[PendingRows], rate: float) -> dict[str, float]:
        means, wait_seconds = self._learn(pending)
        learned_at = time.monotonic()
        failpoint("gradients-ready")
        norm = self._update(rate)
        is_skipped = self._skipped_updates > 0
        if self._anchor is not None and not is_skipped:
            self._anchor.after_update()
        seconds = {"time/optim": time.monotonic() - learned_at}
        seconds |= {"time/teacher_wait": wait_seconds} if self._config.teacher_addresses else {}
        return {**means, "grad_norm": norm, "grad_norm/skipped": float(is_skipped), **seconds}

    def _measure_anchor(self) -> dict[str, float]:
        if self._anchor is None:
            return {}
        return {"anchor/gap": self._anchor.gap(), "anchor/version": float(self._anchor.version)}

    def _learn(self, pending: Sequence[PendingRows]) -> tuple[dict[str, float], float]:
        """Collective. Add up the gradients of the mean loss over all processes.

        Returns the means of the metrics, and the seconds spent waiting for rows.
        """
        flops = torch.tensor([self._efficiency.flops(pending), 0], dtype=torch.float64)
        lengths = sum_over_ranks(self._accelerator, {**count_lengths(pending), "flops": flops})
        tokens, flops_of_all = lengths["length/mean"][0], lengths.pop("flops")[0]
        weight_sum = lengths.pop("counted")[0]
        # DDP and FSDP average gradients over processes; the loss is divided by the global count.
        scale = self._student.gradient_ranks / max(weight_sum, 1.0)
        layout = self._student.full.layout
        sums: dict[str, Tensor] = {}
        wait_seconds = 0.0
        self._student.trained.train()
        groups = micro_batches(pending, self._config.train.tokens_per_micro_batch, layout)
        own_groups = len(groups)
        # All ranks run the same number of micro-batches: a rank with fewer repeats its last one
        # without rows.
        groups += groups[-1:] * (max_over_ranks(self._accelerator, own_groups) - own_groups)
        for group_number, group in enumerate(groups):
            started_at = time.monotonic()
            scored_sequences = self._wait_for_rows(group)
            wait_seconds += time.monotonic() - started_at
            batch = self._objective.batch(scored_sequences, self._student.device, layout)
            if group_number >= own_groups:
                batch = batch.without_rows()
            for group_batch, is_own in self._student.batches_of_group(batch):
                metric_sums = self._add_gradients(
                    group_batch, scale, last=group_number == len(groups) - 1
                )
                if is_own:
                    sums = {name: sums.get(name, 0) + value for name, value in metric_sums.items()}
        totals = {**sum_over_ranks(self._accelerator, sums), **lengths}
        totals["loss"] = (totals["loss"][0], max(weight_sum, 1.0))
        self._has_tokens = weight_sum > 0
        return {**compute_means(totals), "tokens": tokens, "flops": flops_of_all}, wait_seconds

    def _add_gradients(self, batch: Batch, scale: float, *, last: bool) -> dict[str, Tensor]:
        """Collective. Add up the gradients of a batch, and return (sum, number) of metrics."""
        objective = self._objective
        with self._student.synchronized(is_last=last):
            loss = objective.loss(batch)
            fused_loss = self._student(batch, loss, objective.temperature, objective.needs_all_rows)
            self._accelerator.backward(fused_loss.loss_sum * scale)
        metric_sums = objective.metrics(batch, fused_loss)
        return metric_sums | {
            "loss": torch.stack([fused_loss.loss_sum.detach(), fused_loss.loss_sum.new_zeros(())])
        }

    def _wait_for_rows(self, group: list[PendingRows]) -> list[ScoredSequence]:
        """Collective. Wait until every rank has the rows of its micro-batch, and return them."""
        return raise_on_all_ranks(self._accelerator, lambda: [item.wait() for item in group])

    def _update(self, rate: float) -> float:
        """Update the weights, and return the norm of the gradient before clipping.

        An update is skipped on all ranks if the gradient is not finite, or if no token is learned:
        all are masked, or have the weight 0. In RL a gradient of zero is an update, because rewards
        may be equal. Raises Corrupt after more than `train.max_skipped_updates`
        skipped updates in a row.
        """
        set_learning_rate(self._optimizer, rate)
        norm = clip_gradients(self._student, self._config.train.max_grad_norm)
        is_finite = math.isfinite(norm)
        learns = self._has_tokens and (norm > 0 or isinstance(self._config, RLJob))
        is_skipped = not (is_finite and learns)
        if not is_skipped:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._skipped_updates = self._skipped_updates + 1 if is_skipped else 0
        problem = "the gradient is zero: no token is learned"
        field, remedy = (
            "data.path",
            "check masks and weights: distill preview shows what is learned",
        )
        if not is_finite:
            problem, field = "the gradient is not finite", "train.learning_rate"
            remedy = "lower the learning rate and resume from the checkpoint before this step"
        if self._skipped_updates > self._config.train.max_skipped_updates:
            raise Corrupt(
                f"step {self._step + 1}: {problem}, for the update number {self._skipped_updates}"
                " in a row",
                field=field,
                hint=remedy,
            )
        if is_skipped and self._accelerator.is_main_process:
            log.warning("step %d: %s; update skipped", self._step + 1, problem)
        return norm

    def _evaluate(self) -> dict[str, float]:
        self._progress.say("evaluating", self._step)
        if self._rollouts_ahead is not None:
            self._rollouts_ahead.publish(self._step)
        metrics, transcripts = self._evaluation(self._student)
        if self._anchor is not None:
            with self._anchor.in_student_place():
                if self._rollouts_ahead is not None:
                    self._rollouts_ahead.publish(self._step, anchor=True)
                anchor_metrics, _ = self._evaluation(self._student)
            metrics |= {
                name.replace("eval/", "eval/anchor/"): metric
                for name, metric in anchor_metrics.items()
            }
        if transcripts and self._metrics is not None:
            write_samples(self._run, self._step, transcripts)
        return metrics

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(self._step, metrics)
            failpoint("metrics-written")
        note = self._reward_watch.note or self._learning_watch.note
        self._progress.say(f"training ({note})" if note else "training", self._step)

    def _save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Collective. Begin to write the checkpoint of the last finished step, unless it exists.

        `metrics`: of this step, if metrics.jsonl does not have them yet.
        """
        if self._step == self._saved_step:
            return
        self._progress.say("saving", self._step)
        model = self._student.trained.model
        checkpoint_contents = collect_contents(model, self._optimizer, self._anchor, self._critic)
        write_extra_files = (
            self._rollouts_ahead.later_files(self._step)
            if self._rollouts_ahead is not None
            else None
        )
        self._saver.save(self._step, checkpoint_contents, metrics, write_extra_files)
        self._saved_step = self._step

    def _finish_saving(self) -> None:
        """Collective. Wait until the last checkpoint is complete and old ones are deleted."""
        if self._saver.is_writing:
            self._progress.say("saving", self._step)
        self._saver.finish()
        self._delete_old()  # now that the last evaluation is known

    def _delete_old(self) -> None:
        """Delete all checkpoints except the newest and the best ones, in the main process."""
        if self._accelerator.is_main_process:
            best = best_step(read_points(self._run.metrics), self._run.checkpoint_steps())
            delete_old(self._run.checkpoints, self._config.checkpoint.keep, best=best)
            self._copies.begin()

    def _export(self) -> None:
        self._progress.say("exporting", self._step)
        self._require_range()
        export_model(
            self._run.export,
            model=self._student.trained.model,
            tokenizer=self._tokenizer,
            anchor=self._anchor,
            dtype=getattr(torch, self._config.export.dtype),
            main=self._accelerator.is_main_process,
        )
        self._accelerator.wait_for_everyone()
        self._copies.finish(self._step)

    def _require_range(self) -> None:
        """Collective. Raise InvalidInput if a weight is beyond the range of `export.dtype`."""
        if self._config.export.dtype != "float16":
            return
        weights = self._student.trained.model.named_parameters()
        limit = torch.finfo(torch.float16).max
        shards = ((name, local(weight)) for name, weight in weights)
        beyond = [name for name, shard in shards if shard.numel() and shard.abs().max() > limit]
        if max_over_ranks(self._accelerator, len(beyond)):
            raise InvalidInput(
                f"{beyond[0] if beyond else 'a weight'} has a number beyond {limit:g}, the largest"
                " of float16",
                field="export.dtype",
                hint='set export.dtype = "bfloat16" in a new job; the last checkpoint is float32',
            )


def _require_finite(metrics: Mapping[str, float]) -> None:
    """Raise InvalidInput if the log-probs of the student are not numbers before training."""
    for name in ("eval/kl", "eval/cross_entropy", "eval/entropy"):
        if math.isnan(metrics.get(name, 0.0)):
            raise InvalidInput(
                f"{name} of the student is not a number before the first step",
                field="student.model",
                hint="its weights have numbers that are not finite: give another directory",
            )
