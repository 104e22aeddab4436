"""The summary, pipeline, attempts, checkpoints, transcripts and the preview of a job."""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clients.config.kinds import parse_job
from clients.config.summary import JobSummary, summary_of
from clients.data.preview import MAX_BYTES, Preview, parse_preview
from clients.jobs.job import TERMINAL, Job, JobEvent, JobState
from clients.jobs.record import points_of
from clients.jobs.results import JUDGING_METRICS, verdict_of
from clients.runs.best_step import JUDGES, best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import Point
from distill_server.jobs.store import JobStore
from protos.errors import NotFound

_MAX_ATTEMPTS = 50
_MAX_PIPELINE = 100

# Limits for one answer. A checkpoint has a few files for each rank.
_MAX_CHECKPOINTS, _MAX_FILES = 100, 10_000
# Limits for one file. `distill pull` downloads the whole file.
_MAX_BYTES, _MAX_SAMPLES = 512 << 10, 50
_NAME = re.compile(r"step-(\d+)\.jsonl")


def details_of(store: JobStore, job: Job) -> dict[str, Any]:
    """Return the summary, the verdict and the pipeline of a job, as a JSON record.

    - summary: the fields of `JobSummary`; null if this version cannot read the job.
    - verdict: a text.
    - pipeline: the jobs that are connected with the job by dependencies, at most 100 in order of
      submission. Each has its `id`, `name`, `kind`, `state`, and `before`, the ids of its
      dependencies. Empty if there is no other job.
    """
    summary = read_summary(job)
    pipeline = store.dependencies.pipeline_of(job.id, _MAX_PIPELINE)
    members = [store.job(member_id) for member_id in pipeline] if len(pipeline) > 1 else []
    return {
        "summary": summary and asdict(summary),
        "verdict": verdict_of(job, points_of(store.evaluations(job.id, JUDGING_METRICS))),
        "pipeline": [
            {
                "id": member.id,
                "name": member.name,
                "kind": member.kind,
                "state": member.state,
                "before": pipeline[member.id],
            }
            for member in members
        ],
    }


def read_summary(job: Job) -> JobSummary | None:
    """Return the summary of a job, or None if this version cannot read the job."""
    try:
        return summary_of(parse_job(job.config_json))
    except ValidationError:
        return None


def attempts_of(store: JobStore, job: Job) -> list[dict[str, Any]]:
    """Return the newest 50 attempts of a job as JSON records, oldest first.

    - queued_at, started_at, ended_at: Unix seconds; 0 if the attempt has not started or not ended.
    - end: the final state; INTERRUPTED if the server queued the job again; "" while the attempt
      runs.
    - reason: reason of the end.
    - step: the newest step.

    Three bisections over the job's events find the events of one attempt. They make about 60 reads
    in a job with a million events.
    """
    oldest_attempt = max(1, job.attempt - _MAX_ATTEMPTS + 1)
    return [_build_record(store, job, number) for number in range(oldest_attempt, job.attempt + 1)]


def _build_record(store: JobStore, job: Job, number: int) -> dict[str, Any]:
    def read_event(seq: int) -> JobEvent:
        return store.events(job.id, seq - 1, 1)[0]

    def find_first_seq(condition: Callable[[JobEvent], bool]) -> int:
        """Return the first `seq` for which `condition` is true, or else the last `seq` + 1.

        Bisection is valid because the attempt number, and the state within an attempt, only
        advance.
        """
        seqs = range(1, job.last_seq + 1)
        return 1 + bisect.bisect_left(seqs, True, key=lambda seq: condition(read_event(seq)))

    queued_event = read_event(find_first_seq(lambda job_event: job_event.attempt >= number))
    next_seq = find_first_seq(lambda job_event: job_event.attempt > number)
    last_event = read_event(next_seq - 1)
    started_seq = find_first_seq(
        lambda job_event: (
            (job_event.attempt, job_event.state is not JobState.QUEUED) >= (number, True)
        )
    )
    started_event = read_event(started_seq) if started_seq < next_seq else None
    ended_at, end, reason = 0.0, "", ""
    if last_event.state in TERMINAL:
        ended_at, end, reason = last_event.time, last_event.state.value, last_event.reason
    elif next_seq <= job.last_seq:
        next_event = read_event(next_seq)
        ended_at, end, reason = next_event.time, "INTERRUPTED", next_event.reason
    return {
        "attempt": number,
        "queued_at": queued_event.time,
        "started_at": started_event.time
        if started_event and started_event.state not in TERMINAL
        else 0.0,
        "ended_at": ended_at,
        "end": end,
        "reason": reason,
        "step": last_event.step,
    }


def checkpoints_of(run: RunDirectory, points: Sequence[Point] = ()) -> list[dict[str, Any]]:
    """Return the newest 100 checkpoints as JSON records, newest first.

    - step, saved_at: the step, and Unix seconds.
    - bytes: the total size of the files.
    - held_out: `metric` and `value` of the evaluation at the step; null if there is none.
    - is_best: whether `distill pull --checkpoint best` chooses the checkpoint.

    `points` are the evaluations of the job. A checkpoint that is removed meanwhile is not included.
    """
    records = []
    steps = run.checkpoint_steps()
    metrics_by_step = {point.step: point.metrics for point in points}
    best = best_step(points, set(steps))
    best_metrics = {} if best is None else metrics_by_step[best]
    metric = next((name for name in JUDGES if name in best_metrics), "")
    for step in steps[: -_MAX_CHECKPOINTS - 1 : -1]:
        path = run.checkpoint(step)
        with suppress(OSError):
            saved_at = path.stat().st_mtime
            record = {"step": step, "bytes": sum(_iter_sizes(path)), "saved_at": saved_at}
            value = metrics_by_step.get(step, {}).get(metric)
            held_out = None if value is None else {"metric": metric, "value": value}
            records.append({**record, "held_out": held_out, "is_best": step == best})
    return records


def _iter_sizes(path: Path) -> Iterator[int]:
    """Yield the sizes of the first 10,000 files below `path`; links are not followed."""
    file_count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            if (file_count := file_count + 1) > _MAX_FILES:
                return
            yield os.lstat(os.path.join(folder, name)).st_size


def sample_steps(folder: Path) -> list[int]:
    """Return the steps of the files in a folder of transcripts or log-probs, newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(
        (int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True
    )


def samples_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return up to 50 records of a step, from the first 512 KiB of its file in a folder.

    Lines that are not JSON objects are skipped. Raises NotFound if the step has no file.
    """
    records: list[dict[str, Any]] = []
    for line in _read_start(folder / f"step-{step:06d}.jsonl").splitlines()[:_MAX_SAMPLES]:
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError):
            continue  # cut by the size limit, or written by a trainer that was killed
        if isinstance(record, dict):
            records.append(record)
    return records


def evaluation_in(run: RunDirectory) -> list[dict[str, Any]] | None:
    """Return the results of an evaluation by model (`student_trainer/exam/report.py`).

    Returns None if there are no results yet.
    """
    try:
        models = _parse_json(_read_start(run.evaluation / "result.json"))["models"]
    except (NotFound, ValueError, RecursionError, TypeError, KeyError):
        return None
    return models if isinstance(models, list) else None


def _parse_json(text: bytes) -> Any:
    """Parse JSON. NaN and infinite numbers, which JSON for browsers does not have, become texts."""
    return json.loads(text, parse_constant=str)


def preview_in(run: RunDirectory) -> dict[str, Any] | None:
    """Return the preview as a JSON record; None if there is no valid preview.

    If the file is larger than `MAX_BYTES` (an earlier version wrote such files), the record has
    only a warning.
    """
    try:
        document = _read_start(run.preview, MAX_BYTES + 1)
        if len(document) > MAX_BYTES:
            warning = f"the preview has more than {MAX_BYTES >> 10} KiB: distill report shows it"
            return asdict(Preview("", (warning,), (), ()))
        return asdict(parse_preview(document))
    except (NotFound, ValueError):
        return None


def _read_start(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(f"no transcripts in {path.name}", field="step") from error
    with open(descriptor, "rb") as file:
        return file.read(max_bytes)
