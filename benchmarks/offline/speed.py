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

from benchmarks.offline.material import Material, Sizes, capture_settings
from benchmarks.offline.training import job_settings, ways
from benchmarks.shared.programs import JOBS, set_options
from clients.config.capture import CaptureJob
from clients.config.file import load_job
from clients.config.offline import OfflineJob
from clients.config.tables.common import StudentConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_writer import MetricsLog
from clients.runs.progress import Progress
from clients.store.writer import StoreWriter
from student_trainer.assembly import assemble
from student_trainer.data.captured_stores import open_stores
from student_trainer.methods import offline
from student_trainer.methods.offline import StoredSteps
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


def step_times(
    work: Path, material: Material, stores: dict[str, Path], sizes: Sizes
) -> dict[str, Any]:
    """Return the seconds of a step with rows from the store and from memory, and their ratio.

    The ratio is the median over pairs of the same step in consecutive runs.
    """
    way = next(way for way in ways(sizes) if way.tail == "bucket+teacher_samples")
    settings = job_settings(material, stores, sizes, way, seed=0)
    settings |= {"max_steps": str(sizes.timed_steps), "eval.every": "100000"}
    settings |= {"checkpoint.every": "100000", "train.warmup_steps": "0", "eval.prompts": "1"}
    config = load_job(JOBS / "gsm8k_offline.toml", set_options(settings)[1::2]).config
    assert isinstance(config, OfflineJob)
    sources = {"store": StoredSteps, "memory": InMemorySteps}
    found: dict[str, list[float]] = {name: [] for name in sources}
    for repetition in range(sizes.repetitions):
        for name, kind in sources.items():
            with mock.patch.object(offline, "StoredSteps", kind):
                found[name] += _steps_of(work / "steps" / f"{name}-{repetition}", config)
    pairs = zip(found["store"], found["memory"], strict=True)
    ratios = [stored / memory for stored, memory in pairs]
    seconds = {name: statistics.median(values) for name, values in found.items()}
    return {**seconds, "ratio": statistics.median(ratios), "pairs": len(ratios)}


def _steps_of(path: Path, config: OfflineJob) -> list[float]:
    """Return the seconds of each step of a run, without the first one, which warms up."""
    run = RunDirectory.create(path, config)
    progress = _progress(run, config.max_steps)
    verdict = assemble(config, run, {}, open_stores(config), progress, 1, None).train()
    assert verdict == "succeeded"
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record["time/step"] for record in records if "time/step" in record][1:]


def capture_rates(work: Path, material: Material, sizes: Sizes) -> dict[str, Any]:
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
    most = job.teacher.max_batch_tokens
    found: dict[str, list[float]] = {"capture": [], "engine": []}
    for repetition in range(sizes.repetitions + 1):  # the first round warms up
        home = work / "captures" / str(repetition)
        works: dict[str, Callable[[], None]] = {
            "engine": lambda: _score(engine, ask, plan, most),
            "capture": lambda home=home: _capture(engine, ask, plan, most, job, home),
        }
        for name, one in works.items():
            began = time.perf_counter()
            one()
            found[name].append(plan.rows / (time.perf_counter() - began))
    pairs = zip(found["capture"][1:], found["engine"][1:], strict=True)
    ratios = [ours / bare for ours, bare in pairs]
    rates = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {**rates, "ratio": statistics.median(ratios), "ratios": ratios, "rows": plan.rows}


def _score(engine: ScoringEngine, ask: QuerySettings, plan: CapturePlan, most: int) -> None:
    for number in range(len(plan.files) - 1):
        sequences = [plan[index] for index in plan.file(number)]
        for batch in batches([len(one.token_ids) for one in sequences], most):
            engine.score([ask.build_query(sequences[index]) for index in batch])


def _capture(
    engine: ScoringEngine,
    ask: QuerySettings,
    plan: CapturePlan,
    most: int,
    job: CaptureJob,
    home: Path,
) -> None:
    run = RunDirectory.create(home, job)
    files = range(len(plan.files) - 1)
    counts = [len(plan.file(number)) for number in files]
    with StoreWriter(home / "store", {}, counts) as writer:
        metrics = MetricsLog(run, attempt=1, last_step=None)
        progress = _progress(run, sum(counts))
        recorder = Recorder(progress, metrics, lambda: writer.bytes, step=0)
        source = EngineSource(engine, plan, ask, most)
        assert fill(writer, source, plan, files, recorder, ask.encode) == "succeeded"
        metrics.close()


def _progress(run: RunDirectory, steps: int) -> Progress:
    return Progress(run, attempt=1, max_steps=steps, main=True, terminated=lambda: False)
