"""Runs a capture job: checks it, reads the data, and scores the files that are missing."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from clients.config.capture import CaptureJob
from clients.config.file import named_files
from clients.config.tables.common import StudentConfig
from clients.data.formats import exists_here
from clients.data.hub import use_caches_if_away
from clients.data.object_urls import is_object_url
from clients.data.records import DataSet, check_left_out
from clients.data.tokens.tokenizer import tokenizer_facts
from clients.preflight.files import check_here
from clients.preflight.limits import fit_limits, read_limits, write_limits
from clients.preflight.teachers import check_capture
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress, write_preview
from clients.store.copies import files_on_disk
from clients.store.objects import ObjectFolder
from clients.store.writer import StoreWriter
from clients.teacher.client import TeacherClient
from protos.errors import DistillError, InvalidInput, Unavailable
from teacher_service.capture.facts import build_metadata
from teacher_service.capture.filling import fill
from teacher_service.capture.plan import CapturePlan, make_plan, read_plan
from teacher_service.capture.preview import preview_of
from teacher_service.capture.recorder import PHASE, CaptureStopped, Recorder
from teacher_service.capture.sequences import SequenceReader
from teacher_service.capture.sources import EngineSource, QuerySettings, RowSource, ServiceSource
from teacher_service.capture.teacher import TeacherFacts, load_engine
from teacher_service.capture.tokenizing import load_tokenizer

log = logging.getLogger(__name__)

_PREFLIGHT_SECONDS = 20.0  # the time limit for the first answer of the storage
_PLAN = "plan"  # a directory of the run; resumed attempts read it
_SECONDS_BETWEEN_POLLS, _SECONDS_BETWEEN_REPORTS = 1.0, 30.0

MakeSource = Callable[[CapturePlan, QuerySettings], RowSource]


def capture(run: RunDirectory, job: CaptureJob, progress: Progress, attempt: int) -> Verdict:
    """Run one attempt of a capture job; it resumes after the complete files of the store.

    Returns "succeeded", or "cancelled" if the job was asked to stop. Raises a DistillError if the
    job, its teacher or its data cannot be captured, or if the disk is full.
    """
    try:
        return _capture(run, job, progress, attempt)
    except Unavailable:
        if progress.stop_asked():  # the stop came while the job waited for a service
            return "cancelled"
        raise


def _capture(run: RunDirectory, job: CaptureJob, progress: Progress, attempt: int) -> Verdict:
    progress.say("preflight", 0)
    original_job, job = job, files_on_disk(job)
    check_here(job, run.path)
    store_path = job.method.store_in(run.path)
    if is_object_url(store_path):
        _check_storage(store_path, progress.stop_asked)
    _check_hub(job)
    tokenizer = load_tokenizer(job)
    query_settings = QuerySettings.from_job(job)
    with _open_teacher(job) as (teacher, make_source):
        limits = read_limits(run.path) or fit_limits(
            job, {"teacher": teacher.max_length}, remote=True
        )
        write_limits(run.path, limits)
        original_job, job = limits.apply(original_job), limits.apply(job)
        write_preview(run, lambda: preview_of(job, tokenizer, limits=limits))
        teacher.require_same_tokens(tokenizer)
        if job.student is not None:
            narrowed_teacher = teacher.narrow(_student_width(job.student), tokenizer)
            if narrowed_teacher.vocab_size < teacher.vocab_size:
                teacher, query_settings = (
                    narrowed_teacher,
                    replace(query_settings, vocab_size=narrowed_teacher.vocab_size),
                )
        check_capture(teacher, job)
        progress.say("reading data", 0)
        digest = DataSet(job.data.path, job.data.name, job.data.split).fingerprint()
        try:
            plan = _load_or_make_plan(
                job, query_settings, tokenizer, digest, run.path / _PLAN, progress
            )
        except CaptureStopped:
            return "cancelled"
        if not teacher.batch_invariant:
            log.warning(
                "the last bits of this teacher's rows depend on the other sequences that it scores"
                " at the same time; start it with --batch-invariant to avoid this"
            )
        files = plan.files_of(*job.method.part)
        counts = [len(plan.file(number)) for number in files]
        metadata = build_metadata(original_job, teacher, plan, digest)
        progress.expect(sum(counts))
        with StoreWriter(store_path, metadata, counts, stopped=progress.stop_asked) as writer:
            stored_sequences = sum(counts[: writer.files])
            phase = f"{PHASE} ({plan.omissions})" if plan.omissions else PHASE
            progress.say(phase if files else _report_idle_part(job, plan), stored_sequences)
            with closing(
                MetricsLog(run, attempt=attempt, last_step=stored_sequences or None)
            ) as metrics:
                recorder = Recorder(
                    progress, metrics, lambda: writer.bytes, step=stored_sequences, phase=phase
                )
                missing_files = files[writer.files :]
                verdict = fill(
                    writer,
                    make_source(plan, query_settings),
                    plan,
                    missing_files,
                    recorder,
                    query_settings.encode,
                )
        if verdict == "succeeded":
            shutil.rmtree(run.path / _PLAN, ignore_errors=True)
        return verdict


def _report_idle_part(job: CaptureJob, plan: CapturePlan) -> str:
    """Log that this job's part of the data has no files, and return the logged sentence."""
    _, parts = job.method.part
    count = f"{len(plan)} sequences in {len(plan.files) - 1} files"
    message = (
        f"shard {job.method.shard} has nothing to do: {count} are divided among {parts} shards"
    )
    log.warning("%s", message)
    return message


def _check_storage(url: str, stopped: Callable[[], bool]) -> None:
    """Raise a DistillError if the store's URL cannot be used; call this before hours of work."""
    try:
        folder = ObjectFolder(url, patience_seconds=_PREFLIGHT_SECONDS, stopped=stopped)
        folder.require_bucket()
        folder.manifest()
    except DistillError as error:
        error.field = error.field or "method.store"
        raise


def _check_hub(job: CaptureJob) -> None:
    if not all(exists_here(name) for key, name in named_files(job) if key != "teacher.model"):
        use_caches_if_away()


def _student_width(student: StudentConfig) -> int:
    """Return the number of logits of the student's model.

    Raises InvalidInput if the configuration of the model cannot be read.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            student.model, revision=student.revision, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"cannot read the configuration of {student.model}:"
            f" {' '.join(str(error).split())[:300]}",
            field="student.model",
            hint="give a Hugging Face directory or hub id with a config.json, or remove the key",
        ) from error
    return int(config.get_text_config().vocab_size)


@contextmanager
def _open_teacher(job: CaptureJob) -> Iterator[tuple[TeacherFacts, MakeSource]]:
    """Yield the facts about the teacher, and a function that makes the row source of a plan."""
    if job.method.ray is not None:
        from teacher_service.capture.ray_source import RaySource

        source = RaySource(job)
        yield TeacherFacts.from_engine(source.info()), source.for_plan
        return
    if job.teacher.model is None:
        patience, prefetch_bytes = job.teacher.patience_seconds, job.teacher.prefetch_mib << 20
        with TeacherClient(
            job.teacher.address,
            patience_seconds=patience,
            max_prefetch_bytes=prefetch_bytes,
            background=True,
            adapter=job.teacher.adapter or "",
        ) as client:
            facts = TeacherFacts.from_service(client)
            yield (
                facts,
                lambda plan, query_settings: ServiceSource(
                    client, plan, query_settings, prefetch_bytes
                ),
            )
        return
    engine = load_engine(job.teacher)
    max_batch_tokens = job.teacher.max_batch_tokens
    facts = TeacherFacts.from_engine(engine.info)
    yield (
        facts,
        lambda plan, query_settings: EngineSource(engine, plan, query_settings, max_batch_tokens),
    )


def _load_or_make_plan(
    job: CaptureJob,
    query_settings: QuerySettings,
    tokenizer: Any,
    digest: str,
    directory: Path,
    progress: Progress,
) -> CapturePlan:
    """Return the plan of an earlier attempt, or read the data and make a plan.

    `digest` is the digest of the data. Raises CaptureStopped if the job is stopped meanwhile.
    """
    row_bytes, file_bytes = query_settings.row_bytes, job.method.shard_bytes
    key = _plan_key(job, tokenizer, [digest, row_bytes, file_bytes])
    plan = read_plan(directory, key)
    if plan is None:
        context, max_tokens = job.teacher.context, job.method.max_tokens
        reader = SequenceReader(job.data, tokenizer, max_tokens, context=context)
        plan = make_plan(
            reader,
            directory,
            row_bytes=row_bytes,
            file_bytes=file_bytes,
            key=key,
            on_poll=_ReadingMonitor(progress, reader),
        )
    if not len(plan):
        raise InvalidInput(
            f"{job.data.path} has no sequence of at most {job.method.max_tokens} tokens"
            f" ({plan.omissions or 'no record'})",
            field="data.path",
            hint="give more data, or a larger method.max_tokens",
        )
    if job.data.form != "text":
        reasons = {"too long": plan.too_long, "with nothing to score": plan.empty}
        records = len(plan) + sum(reasons.values())
        check_left_out(reasons, records, job.data.max_left_out, "data.path")
    log.info(
        "%d sequences with %d rows in %d files%s",
        len(plan),
        plan.rows,
        len(plan.files) - 1,
        plan.omissions and f"; {plan.omissions}",
    )
    return plan


def _plan_key(job: CaptureJob, tokenizer: Any, other_facts: Sequence[object]) -> str:
    """Return a digest of everything that a plan depends on."""
    data_facts = job.data.model_dump(mode="json"), job.teacher.context
    facts = [*data_facts, job.method.max_tokens, *other_facts]
    hasher = hashlib.sha256(json.dumps(facts).encode())
    hasher.update(json.dumps(tokenizer_facts(tokenizer)).encode())
    return hasher.hexdigest()


class _ReadingMonitor:
    """Polls for a stop request about once a second, and reports the number of records read."""

    def __init__(self, progress: Progress, reader: SequenceReader) -> None:
        self._progress = progress
        self._reader = reader
        self._last_poll = self._last_report = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last_poll < _SECONDS_BETWEEN_POLLS:
            return
        self._last_poll = now
        if self._progress.stop_wanted():
            raise CaptureStopped
        if now - self._last_report >= _SECONDS_BETWEEN_REPORTS:
            self._last_report = now
            self._progress.say(f"reading data: {self._reader.records:,} records", 0)
