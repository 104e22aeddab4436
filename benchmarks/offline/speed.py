"""The time overhead of a store: for a step that reads it, and for a capture that writes it.

Each is measured in this process, in turn with the same work without a store. The result is the
median ratio of neighbouring measurements, which cancels slow changes of the machine's load.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.offline.material import OfflineMaterial, OfflineSizes, capture_settings
from benchmarks.offline.training import job_settings, training_methods
from benchmarks.shared.programs import JOBS, set_options
from clients.config.capture import CaptureJob
from clients.config.file import load_job
from clients.config.offline import OfflineJob
from clients.config.tables.common import StudentConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress
from clients.store.writer import StoreWriter
from student_trainer.assembly import assemble
from student_trainer.methods import offline
from student_trainer.methods.offline_steps import StoredSteps
from student_trainer.model.loading import load_tokenizer
from student_trainer.teachers.source import PendingRows
from teacher_service.capture.filling import fill
from teacher_service.capture.plan import CapturePlan, make_plan
from teacher_service.capture.recorder import Recorder
from teacher_service.capture.sequences import SequenceReader
from teacher_service.capture.sources import EngineSource, QuerySettings, batches
from teacher_service.capture.teacher import load_engine
from teacher_service.engines.base import ScoringEngine


class InMemorySteps(StoredSteps):
    """Reads, verifies and decodes all rows of a job before its first step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        steps = range(1, options["last_step"] + 1)
        self._ready = {step: super(InMemorySteps, self).of_step(step) for step in steps}

    def of_step(self, step: int) -> list[PendingRows]:
        return self._ready[step]


def compare_step_times(
    work: Path, material: OfflineMaterial, stores: dict[str, Path], sizes: OfflineSizes
) -> dict[str, Any]:
    """Return the seconds of a step with rows from the store and from memory, and their ratio.

    The ratio is the median over pairs of the same step in consecutive runs.
    """
    method = next(
        method for method in training_methods(sizes) if method.tail == "bucket+teacher_samples"
    )
    settings = job_settings(material, stores, sizes, method, seed=0)
    settings |= {"max_steps": str(sizes.timed_steps), "eval.every": "100000"}
    settings |= {"checkpoint.every": "100000", "train.warmup_steps": "0", "eval.prompts": "1"}
    config = load_job(JOBS / "gsm8k_offline.toml", set_options(settings)[1::2]).config
    assert isinstance(config, OfflineJob)
    sources = {"store": StoredSteps, "memory": InMemorySteps}
    seconds_by_source: dict[str, list[float]] = {name: [] for name in sources}
    for repetition in range(sizes.repetitions):
        for name, kind in sources.items():
            with mock.patch.object(offline, "StoredSteps", kind):
                seconds_by_source[name] += _time_steps(
                    work / "steps" / f"{name}-{repetition}", config
                )
    pairs = zip(seconds_by_source["store"], seconds_by_source["memory"], strict=True)
    ratios = [stored / memory for stored, memory in pairs]
    seconds = {name: statistics.median(values) for name, values in seconds_by_source.items()}
    return {**seconds, "ratio": statistics.median(ratios), "pairs": len(ratios)}


def _time_steps(path: Path, config: OfflineJob) -> list[float]:
    """Return the seconds of each step of a run, without the first one, which warms up."""
    run = RunDirectory.create(path, config)
    progress = _make_progress(run, config.max_steps)
    verdict = assemble(config, run, {}, progress, 1, None).train()
    assert verdict == "succeeded"
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record["time/step"] for record in records if "time/step" in record][1:]


def compare_capture_rates(
    work: Path, material: OfflineMaterial, sizes: OfflineSizes
) -> dict[str, Any]:
    """Return rows per second of a capture and of its engine alone, on the same batches."""
    work.mkdir(parents=True, exist_ok=True)
    part = work / "timed.jsonl"
    lines = material.train.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[: sizes.timed_records]))
    settings = capture_settings(material, part, sizes, sizes.top_k, sizes.tail_samples)
    job = load_job(JOBS / "gsm8k_capture.toml", set_options(settings)[1::2]).config
    assert isinstance(job, CaptureJob)
    engine, ask = load_engine(job.teacher), QuerySettings.from_job(job)
    tokenizer = load_tokenizer(StudentConfig(model=str(material.teacher)))
    reader = SequenceReader(job.data, tokenizer, job.method.max_tokens)
    plan = make_plan(
        reader, work / "plan", row_bytes=ask.row_bytes, file_bytes=job.method.shard_bytes
    )
    max_tokens = job.teacher.max_batch_tokens
    rates_by_work: dict[str, list[float]] = {"capture": [], "engine": []}
    for repetition in range(sizes.repetitions + 1):  # the first round warms up
        home = work / "captures" / str(repetition)
        functions: dict[str, Callable[[], None]] = {
            "engine": lambda: _score_plan(engine, ask, plan, max_tokens),
            "capture": lambda home=home: _capture_plan(engine, ask, plan, max_tokens, job, home),
        }
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            rates_by_work[name].append(plan.rows / (time.perf_counter() - began))
    pairs = zip(rates_by_work["capture"][1:], rates_by_work["engine"][1:], strict=True)
    ratios = [capture_rate / engine_rate for capture_rate, engine_rate in pairs]
    rates = {name: statistics.median(values[1:]) for name, values in rates_by_work.items()}
    return {**rates, "ratio": statistics.median(ratios), "ratios": ratios, "rows": plan.rows}


def _score_plan(
    engine: ScoringEngine, ask: QuerySettings, plan: CapturePlan, max_tokens: int
) -> None:
    for number in range(len(plan.files) - 1):
        sequences = [plan[index] for index in plan.file(number)]
        for batch in batches([len(sequence.token_ids) for sequence in sequences], max_tokens):
            engine.score([ask.build_query(sequences[index]) for index in batch])


def _capture_plan(
    engine: ScoringEngine,
    ask: QuerySettings,
    plan: CapturePlan,
    max_tokens: int,
    job: CaptureJob,
    home: Path,
) -> None:
    run = RunDirectory.create(home, job)
    files = range(len(plan.files) - 1)
    counts = [len(plan.file(number)) for number in files]
    with StoreWriter(home / "store", {}, counts) as writer:
        metrics = MetricsLog(run, attempt=1, last_step=None)
        progress = _make_progress(run, sum(counts))
        recorder = Recorder(progress, metrics, lambda: writer.bytes, step=0)
        source = EngineSource(engine, plan, ask, max_tokens)
        assert fill(writer, source, plan, files, recorder, ask.encode) == "succeeded"
        metrics.close()


def _make_progress(run: RunDirectory, steps: int) -> Progress:
    return Progress(run, attempt=1, max_steps=steps, main=True, terminated=lambda: False)
