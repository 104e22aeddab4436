"""The training loop.

A step depends only on the weights, optimizer state, anchor, critic, seed and step number; with
`rollouts.lag`, it also depends on rollouts that earlier weights sampled. A checkpoint contains all
of these. A killed and resumed run is therefore bit-identical to an uninterrupted run, with one
exception: the count of consecutive skipped updates, which can end a run, restarts at 0. A step has
one optimizer update. In RL, a step has `method.epochs_per_step` epochs with
`method.updates_per_step` updates each.

In each step, the trainer gets the sequences from the method (`steps`) and splits them into
micro-batches. For one micro-batch at a time, it waits for the teacher's rows and adds up the
gradients. Then it updates the student, and after it the anchor. The trainer saves, evaluates and
logs at the intervals of the job.

If a step is saved and evaluated, its state is copied for the checkpoint before the evaluation. A
failed evaluation therefore loses no step. The checkpoint then contains the metrics of its step. If
metrics.jsonl lacks the line of that step, an attempt that resumes repeats the evaluation and writes
the line. Checkpoints are written while training continues (`saver.py`). The last checkpoint is
complete before the run ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from clients.config.kinds import AnyTraining
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
from student_trainer.loop.efficiency import Efficiency
from student_trainer.loop.evaluation import write_samples
from student_trainer.loop.learner import Learner, Method
from student_trainer.loop.optimizer import learning_rate, warn_of_schedule
from student_trainer.loop.step import (
    combine_updates,
    compute_means,
    sum_over_ranks,
)
from student_trainer.loop.watches import HeadWatch, LearningWatch
from student_trainer.model.loading import local_directory
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Trainer:
    """Runs the steps of a job, from the step after the last finished one to the verdict.

    - step: the last finished step; 0 for a new run.
    - metrics: the metrics log; None in other processes than the main process.
    - resumed_metrics: the metrics of `step`, if its checkpoint contains them.
    - source_files: the result of `read_source_files`; {} in other processes than the main process.
    """

    config: AnyTraining
    run: RunDirectory
    progress: Progress
    method: Method
    step: int
    accelerator: Accelerator
    student: Replicated | Sharded
    optimizer: torch.optim.Optimizer
    tokenizer: Any
    copies: RunCopies
    metrics: MetricsLog | None
    resumed_metrics: Mapping[str, float] | None = None
    source_files: Mapping[str, bytes] | None = None

    def __post_init__(self) -> None:
        student, accelerator, metrics = self.student, self.accelerator, self.metrics
        self._saved_step = self.step
        self._efficiency = Efficiency(student.trained, student.device, accelerator.num_processes)
        self.learner = Learner(
            self.config, accelerator, student, self.optimizer, self.method, self._efficiency
        )
        main, model = accelerator.is_main_process, student.trained.model
        self._source = local_directory(self.config.student)
        self._saver = Saver(
            accelerator,
            self.run.checkpoints,
            small_files=collect_small_files(model, self.tokenizer, self.source_files)
            if main
            else {},
            facts=self.method.facts,
            before_publication=metrics.sync if metrics is not None else lambda: None,
            after_publication=self._delete_old,
        )
        self.watches = [*self.method.watches, LearningWatch(self.config)]
        if self.config.learns_from_head:
            self.watches.append(HeadWatch(read_points(self.run.metrics)))

    def train(self) -> Verdict:
        """Collective. Train until `max_steps`, export the model, and return the verdict.

        The verdict is "succeeded", or "cancelled" if a stop of the run was requested. All
        checkpoints are complete when this method returns or raises a DistillError.

        Raises the DistillError of a failed evaluation or step. Before that, this method saves a
        checkpoint of the last finished step, unless the failed step has already changed a weight.
        """
        try:
            return self._train()
        finally:
            if self.method.rollouts_ahead is not None:
                self.method.rollouts_ahead.close()
            self._saver.close()
            self.copies.close()
            if self.metrics is not None:
                self.metrics.close()

    def _train(self) -> Verdict:
        config = self.config
        if self.metrics is not None:
            warn_of_schedule(config.train, config.max_steps, self.metrics.last)
        if self.step == 0:
            metrics = self._evaluate()
            _require_finite(metrics)
            self._log(metrics)
        elif self.resumed_metrics is not None and self._is_unlogged():
            self._evaluate_and_log(self.resumed_metrics)
        while self.step < config.max_steps:
            stop = self.progress.stop_wanted()
            if stop:
                if stop == "checkpoint":
                    self._save()
                self._finish_saving()
                self.copies.finish(self.step, hurry=True)
                return "cancelled"
            metrics = self._train_or_save(self.step + 1)
            failpoint("step-done")
            self.step += 1
            self._saver.poll()
            if self.accelerator.is_main_process:  # one process is enough to log the warnings
                for watch in self.watches:
                    watch.see(self.step, metrics)
            if self._is_due(config.checkpoint.every):
                self._save(metrics)
            self._evaluate_and_log(metrics)
        self._require_an_update()
        self._finish_saving()
        self._export()
        if self.metrics is not None:
            warn_of_chance(self.run)
        return "succeeded"

    def _require_an_update(self) -> None:
        """Collective. Raise Corrupt if every update of the run was skipped."""
        points = read_points(self.run.metrics) if self.metrics is not None else iter(())
        skipped = (
            point.metrics["grad_norm/skipped"]
            for point in points
            if "grad_norm/skipped" in point.metrics
        )
        is_unchanged = next(skipped, 0) == 1 and all(share == 1 for share in skipped)
        if max_over_ranks(self.accelerator, int(is_unchanged)):
            raise Corrupt(
                "every update of the run was skipped, so nothing was learned",
                field="data.path",
                hint="check the data, the rewards and the student; distill preview shows which"
                " tokens are learned",
            )

    def _is_due(self, interval: int) -> bool:
        return self.step == self.config.max_steps or self.step % interval == 0

    def _is_unlogged(self) -> bool:
        """Collective. Return whether metrics.jsonl lacks the line of step `self.step`."""
        is_unlogged = self.metrics is not None and (
            self.metrics.last is None or self.metrics.last.step != self.step
        )
        return bool(max_over_ranks(self.accelerator, int(is_unlogged)))

    def _evaluate_and_log(self, metrics: Mapping[str, float]) -> None:
        """Collective. Write the metrics of the last finished step to metrics.jsonl.

        At the interval `eval.every` and after the last step, first evaluate the student, and add
        the metrics of the evaluation.
        """
        if not self._is_due(self.config.eval.every):
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
        if self._saved_step == self.step and not self._saver.is_writing:
            self._delete_old()  # the evaluation may have found a new best checkpoint

    def _train_or_save(self, step: int) -> dict[str, float]:
        self._is_within_step = False
        critic_updates = self._count_critic_updates()
        try:
            return self._train_step(step)
        except DistillError:
            # If no rank has changed a weight of the student or of the critic since the last
            # finished step, that step can be saved.
            if not self._is_within_step and self._count_critic_updates() == critic_updates:
                self._save()
            self._finish_saving()
            raise

    def _count_critic_updates(self) -> int:
        return 0 if self.method.critic is None else self.method.critic.updates

    def _train_step(self, step: int) -> dict[str, float]:
        started_at = time.monotonic()
        self._efficiency.begin()
        step_share = self.method.steps(step)
        if self.method.rollouts_ahead is not None:
            self.method.rollouts_ahead.before_learning()
        rollouts_at = time.monotonic()
        rate = learning_rate(self.config.train, step, self.config.max_steps)
        updates = []
        for pending in step_share.updates:
            updates.append(self.learner.learn(step, pending, rate))
            self._is_within_step = True
        ended_at = time.monotonic()
        step_metrics = (
            compute_means(sum_over_ranks(self.accelerator, step_share.metric_sums))
            if step_share.metric_sums
            else {}
        )
        means = combine_updates(updates)
        speed = means["tokens"] / (ended_at - started_at)
        learning = ended_at - rollouts_at - means.get("time/teacher_wait", 0.0)
        efficiency = self._efficiency.of_step(flops=means["flops"], learning=learning, speed=speed)
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

    def _measure_anchor(self) -> dict[str, float]:
        anchor = self.method.anchor
        if anchor is None:
            return {}
        return {"anchor/gap": anchor.gap(), "anchor/version": float(anchor.version)}

    def _evaluate(self) -> dict[str, float]:
        self.progress.say("evaluating", self.step)
        if self.method.rollouts_ahead is not None:
            self.method.rollouts_ahead.publish(self.step)
        metrics, transcripts, tokens = self.method.evaluation(self.student)
        if self.method.anchor is not None:
            with self.method.anchor.in_student_place():
                if self.method.rollouts_ahead is not None:
                    self.method.rollouts_ahead.publish(self.step, anchor=True)
                anchor_metrics, _, _ = self.method.evaluation(self.student)
            metrics |= {
                name.replace("eval/", "eval/anchor/"): metric
                for name, metric in anchor_metrics.items()
            }
        for folder, records in (
            (self.run.samples, transcripts),
            (self.run.token_logprobs, tokens),
        ):
            if records and self.metrics is not None:
                write_samples(folder, self.step, records)
        return metrics

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(self.step, metrics)
            failpoint("metrics-written")
        note = next((watch.note for watch in self.watches if watch.note), "")
        self.progress.say(f"training ({note})" if note else "training", self.step)

    def _save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Collective. Start to write the checkpoint of the last finished step, unless it already
        exists.

        `metrics`: the metrics of this step if metrics.jsonl does not contain them yet, otherwise
        None.
        """
        if self.step == self._saved_step:
            return
        self.progress.say("saving", self.step)
        method, model = self.method, self.student.trained.model
        contents = collect_contents(model, self.optimizer, method.anchor, method.critic)
        ahead = method.rollouts_ahead
        later_files = None if ahead is None else ahead.later_files(self.step)
        self._saver.save(self.step, contents, metrics, later_files)
        self._saved_step = self.step

    def _finish_saving(self) -> None:
        """Collective. Wait until the last checkpoint is complete, and delete old checkpoints."""
        if self._saver.is_writing:
            self.progress.say("saving", self.step)
        self._saver.finish()
        self._delete_old()  # now that the last evaluation is known

    def _delete_old(self) -> None:
        """Delete all checkpoints except the newest ones and the best one.

        Only the main process does this.
        """
        if self.metrics is not None:
            best = best_step(self.metrics.evaluations, self.run.checkpoint_steps())
            delete_old(self.run.checkpoints, self.config.checkpoint.keep, best=best)
            self.copies.begin()

    def _export(self) -> None:
        """Collective. Write the export in the dtype of the job.

        If a weight exceeds the range of float16, the export is in bfloat16 instead.
        """
        self.progress.say("exporting", self.step)
        dtype = getattr(torch, self.config.export.dtype)
        try:
            raise_on_all_ranks(self.accelerator, lambda: self._export_in(dtype))
        except InvalidInput as overflow:
            self.progress.note(f"the export is in bfloat16, not float16: {overflow.message}")
            raise_on_all_ranks(self.accelerator, lambda: self._export_in(torch.bfloat16))
        self.copies.finish(self.step)

    def _export_in(self, dtype: torch.dtype) -> None:
        export_model(
            self.run.export,
            model=self.student.trained.model,
            tokenizer=self.tokenizer,
            source=self._source,
            source_files=self.source_files,
            note=self.progress.note,
            anchor=self.method.anchor,
            dtype=dtype,
            main=self.accelerator.is_main_process,
        )


def _require_finite(metrics: Mapping[str, float]) -> None:
    """Raise InvalidInput if the first evaluation, before any training, has given NaN."""
    for name in ("eval/kl", "eval/cross_entropy", "eval/entropy"):
        if math.isnan(metrics.get(name, 0.0)):
            raise InvalidInput(
                f"{name} of the student is not a number before the first step",
                field="student.model",
                hint="the weights have values that are not finite: give another directory",
            )
