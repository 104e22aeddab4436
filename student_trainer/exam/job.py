"""Run one attempt of an evaluation job: python -m student_trainer.exam.job RUN_DIR --attempt N."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from clients.config.evaluation import EvalJob
from clients.config.exam import ExamConfig
from clients.config.file import named_files
from clients.config.kinds import AnyJob
from clients.data.hub import use_caches_if_away
from clients.preflight.files import check_files, check_here
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.metrics_writer import MetricsLog
from clients.runs.program import run_program
from clients.runs.progress import Progress
from clients.store.copies import files_on_disk
from protos.errors import DistillError
from student_trainer.exam import evaluation
from student_trainer.exam.answer_store import StoredAnswer
from student_trainer.exam.asking import Stopped

_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_LOOKS = 0.2
# The keys of the job by the options of `distill eval`, which the errors of an evaluation name.
_KEYS = {
    "--data": "data.path",
    "--answer-column": "data.answer_column",
    "--max-tokens": "method.max_new_tokens",
    "MODEL": "student.model",
    "--out": "",
}


def main() -> int:
    """Run the attempt and return the exit code; command-line errors exit with code 2."""
    return run_program("student_trainer.exam.job", __doc__, evaluate)


def evaluate(run: RunDirectory, job: AnyJob, progress: Progress) -> Verdict:
    """Run one attempt of an evaluation; it requests the answers that are not on the disk.

    Returns "succeeded", or "cancelled" if the job was asked to stop. Raises a DistillError if the
    model or the data cannot be used.
    """
    assert isinstance(job, EvalJob), "launch.py starts the program of each kind"
    progress.say("preflight", 0)
    check_files(job)
    job = files_on_disk(job)
    check_here(job, run.path)
    if not all(Path(name).exists() for _, name in named_files(job)):
        use_caches_if_away()
    progress.say("loading the model", 0)
    # Imported late: it loads torch, and the checks above do not need it.
    from student_trainer.run.provenance import write_environment

    write_environment(run, attempt=progress.attempt, processes=1)
    config = exam_of(job, run)
    try:
        with closing(JobWatcher(run, progress, models=len(config.models))) as watcher:
            watcher.end(evaluation.run(config, watcher))
    except Stopped:
        return "cancelled"
    except DistillError as error:
        if error.field == "--out":
            error.hint = "the model or the data has changed since the first attempt; submit the job"
        error.field = _KEYS.get(error.field, error.field)
        raise
    return "succeeded"


def exam_of(job: EvalJob, run: RunDirectory) -> ExamConfig:
    """Return the evaluation of a job: of the student, and of its anchor if there is one."""
    models = {"student": job.student.model}
    anchor = Path(job.student.model) / "anchor"
    if (anchor / "config.json").is_file():
        models["anchor"] = str(anchor)
    method = job.method
    return ExamConfig(
        models=models,
        out=str(run.evaluation),
        reward=job.reward,
        data=job.data,
        prompts=method.prompts,
        samples=method.samples,
        temperature=method.temperature,
        top_p=method.top_p,
        max_tokens=method.max_new_tokens,
        seed=job.seed,
        endpoint=None,
        api="chat",
        in_flight=1,
        patience_seconds=1.0,
    )


class JobWatcher:
    """Counts answers as steps, and writes a line of metrics about once a second.

    The last step has the results. `close` it.
    """

    def __init__(self, run: RunDirectory, progress: Progress, *, models: int) -> None:
        self._run = run
        self._progress = progress
        self._models = models
        self._begun = self._done = self._total = self._tokens = 0
        self._phase = ""
        self._log: MetricsLog | None = None
        self._printed = self._looked = time.monotonic()
        self._stopped = False

    def begin(self, model: str, stored: int, total: int) -> None:
        """Count the stored answers of a model; the models before it have all of theirs."""
        self._total = self._models * total
        self._done = self._begun * total + stored
        self._begun += 1
        self._phase = f"evaluating the {model}"
        self._progress.expect(self._total)
        self._progress.say(self._phase, self._done)
        if stored < total:
            self._opened()

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Count answers. Raises WrongState if a newer attempt has replaced this one."""
        self._done += len(answers)
        self._tokens += sum(answer.tokens for answer in answers)
        self._progress.say(self._phase, self._done)
        passed = time.monotonic() - self._printed
        if passed >= _SECONDS_BETWEEN_LINES and self._done < self._total:
            speed = self._tokens / passed
            self._opened().write(self._done, {"tokens": self._tokens, "tokens_per_sec": speed})
            self._tokens, self._printed = 0, time.monotonic()

    def is_stopped(self) -> bool:
        """Return whether the job was asked to stop; reads a file a few times a second."""
        now = time.monotonic()
        if not self._stopped and now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._stopped = self._progress.stop_asked()
        return self._stopped

    def end(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the results as the metrics of the last step."""
        log = self._opened()
        log.write(self._total, results_of(rows))
        log.sync()
        self._progress.say(self._phase, self._total)

    def close(self) -> None:
        """Close the metrics."""
        if self._log is not None:
            self._log.close()

    def _opened(self) -> MetricsLog:
        """Return the metrics, without the last step: an attempt that was killed may have it."""
        if self._log is None:
            last = min(self._done, self._total - 1)
            attempt = self._progress.attempt
            self._log = MetricsLog(self._run, attempt=attempt, last_step=last or None)
        return self._log


def results_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation: of the student and, under eval/anchor/, of its anchor.

    `rows`: of `evaluation.run`, one per model.
    """
    student, samples = rows[0], rows[0]["samples"]
    found = {
        "length/mean": student["tokens"]["mean"],
        "length/truncated": student["truncated"],
        "reward/errors": student["errors"] / (student["prompts"] * samples),
    }
    for row, prefix in zip(rows, ("eval/", "eval/anchor/"), strict=False):
        found[f"{prefix}accuracy"] = row["pass@1"]["mean"]
        found[f"{prefix}reward"] = row["reward"]["mean"]
        if samples > 1:
            found[f"{prefix}pass@{samples}"] = row[f"pass@{samples}"]["mean"]
            found[f"{prefix}maj@{samples}"] = row[f"maj@{samples}"]["mean"]
    return found


if __name__ == "__main__":
    sys.exit(main())
