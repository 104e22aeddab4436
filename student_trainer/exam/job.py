"""Run one attempt of an evaluation job: python -m student_trainer.exam.job RUN_DIR --attempt N."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from clients.config.evaluation import EvalJob, ExamConfig
from clients.config.file import named_files
from clients.config.tables.common import ModelSettings
from clients.data.formats import exists_here
from clients.data.hub import use_caches_if_away
from clients.preflight.files import check_files, check_here
from clients.preflight.limits import fit_limits, read_limits, write_limits
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress, run_program
from clients.store.copies import files_on_disk
from protos.errors import DistillError
from student_trainer.exam.answer_store import ExamStopped, StoredAnswer
from student_trainer.exam.evaluation import Watcher
from student_trainer.exam.evaluation import run as run_exam

_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_LOOKS = 0.2
# The keys of the job by the options of `distill eval`, which the errors of an evaluation name.
_JOB_KEYS = {
    "--data": "data.path",
    "--answer-column": "data.answer_column",
    "--max-tokens": "method.max_new_tokens",
    "MODEL": "student.model",
    "--out": "",
}


def main() -> int:
    """Run the attempt and return the exit code; 2 for an error in the command line."""
    return run_program(EvalJob, "student_trainer.exam.job", __doc__, evaluate)


def evaluate(run: RunDirectory, job: EvalJob, progress: Progress) -> Verdict:
    """Run one attempt of an evaluation job. Requests only the answers that are not on disk.

    Returns "succeeded", or "cancelled" if a stop was requested. Raises a DistillError if the model
    or the data cannot be used.
    """
    progress.say("preflight", 0)
    check_files(job)
    job = files_on_disk(job)
    check_here(job, run.path)
    if not all(exists_here(name) for _, name in named_files(job)):
        use_caches_if_away()
    limits = read_limits(run.path) or fit_limits(job, remote=True)
    write_limits(run.path, limits)
    job = limits.apply(job)
    progress.say("loading the model", 0)
    # Imported late: it loads torch, and the checks above do not need it.
    from student_trainer.run.provenance import write_environment

    write_environment(run, attempt=progress.attempt, processes=1)
    config = build_exam_config(job, run)
    try:
        with closing(JobWatcher(run, progress, models=len(config.models))) as watcher:
            watcher.end(run_exam(config, watcher))
    except ExamStopped:
        return "cancelled"
    except DistillError as error:
        if error.field == "--out":
            error.hint = "the model or the data has changed since the first attempt; submit the job"
        error.field = _JOB_KEYS.get(error.field, error.field)
        raise
    return "succeeded"


def build_exam_config(job: EvalJob, run: RunDirectory) -> ExamConfig:
    """Return the configuration of a job's evaluation.

    The models are the student and, if the student's directory contains one, its anchor.
    """
    models = {"student": job.student.model}
    anchor = Path(job.student.model) / "anchor"
    if (anchor / "config.json").is_file():
        models["anchor"] = str(anchor)
    return ExamConfig(
        models=models,
        out=str(run.evaluation),
        method=job.method,
        reward=job.reward,
        data=job.data,
        seed=job.seed,
        student=ModelSettings(chat_template=job.student.chat_template),
    )


class JobWatcher(Watcher):
    """Reports an evaluation as a job: each answer is a step, and metrics are written once per
    second.

    The metrics of the last step are the results of the evaluation. Call `close` at the end.
    """

    def __init__(self, run: RunDirectory, progress: Progress, *, models: int) -> None:
        self._run = run
        self._progress = progress
        self._models = models
        self._models_begun = self._answer_count = self._total = self._tokens = 0
        self._phase = ""
        self._log: MetricsLog | None = None
        self._printed_at = self._checked_at = time.monotonic()
        self._stop_requested = False

    def begin(self, model: str, stored_count: int, total: int) -> None:
        """Start to count the answers of a model. `stored_count` of its `total` answers are on disk.

        All answers of the models before it are already on disk.
        """
        self._total = self._models * total
        self._answer_count = self._models_begun * total + stored_count
        self._models_begun += 1
        self._phase = f"evaluating the {model}"
        self._progress.expect(self._total)
        self._progress.say(self._phase, self._answer_count)
        if stored_count < total:
            self._open_log()

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Count further answers, and write metrics about once per second.

        Raises WrongState if a newer attempt has taken over the run.
        """
        self._answer_count += len(answers)
        self._tokens += sum(answer.tokens for answer in answers)
        self._progress.say(self._phase, self._answer_count)
        elapsed_seconds = time.monotonic() - self._printed_at
        if elapsed_seconds >= _SECONDS_BETWEEN_LINES and self._answer_count < self._total:
            speed = self._tokens / elapsed_seconds
            self._open_log().write(
                self._answer_count, {"tokens": self._tokens, "tokens_per_sec": speed}
            )
            self._tokens, self._printed_at = 0, time.monotonic()

    def is_stopped(self) -> bool:
        """Return whether a stop of the job was requested.

        The method looks for the request, which is a file, only a few times per second.
        """
        now = time.monotonic()
        if not self._stop_requested and now - self._checked_at >= _SECONDS_BETWEEN_LOOKS:
            self._checked_at = now
            self._stop_requested = self._progress.stop_asked()
        return self._stop_requested

    def end(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the results as the metrics of the last step."""
        log = self._open_log()
        log.write(self._total, collect_metrics(rows))
        log.sync()
        self._progress.say(self._phase, self._total)

    def close(self) -> None:
        """Close the metrics file."""
        if self._log is not None:
            self._log.close()

    def _open_log(self) -> MetricsLog:
        """Return the metrics log. The first call opens it without the line of the last step.

        A killed attempt may have written only a part of this line.
        """
        if self._log is None:
            last_step = min(self._answer_count, self._total - 1)
            attempt = self._progress.attempt
            self._log = MetricsLog(self._run, attempt=attempt, last_step=last_step or None)
        return self._log


def collect_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the student, and those of its anchor with the prefix eval/anchor/.

    `rows`: the result of `evaluation.run`, one row per model.
    """
    student, sample_count = rows[0], rows[0]["samples"]
    metrics = {
        "length/mean": student["tokens"]["mean"],
        "length/truncated": student["truncated"],
        "reward/errors": student["errors"] / (student["prompts"] * sample_count),
    }
    for row, prefix in zip(rows, ("eval/", "eval/anchor/"), strict=False):
        metrics[f"{prefix}accuracy"] = row["pass@1"]["mean"]
        metrics[f"{prefix}reward"] = row["reward"]["mean"]
        if sample_count > 1:
            metrics[f"{prefix}pass@{sample_count}"] = row[f"pass@{sample_count}"]["mean"]
            metrics[f"{prefix}maj@{sample_count}"] = row[f"maj@{sample_count}"]["mean"]
    return metrics


if __name__ == "__main__":
    sys.exit(main())
