"""What people follow live: a job's events and the log of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from clients.jobs.artifacts import require_files
from clients.jobs.job import TERMINAL, Job, JobEvent
from clients.runs.directory import RunDirectory
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.store import Store
from protos.errors import InvalidInput, NotFound

# All a watcher ever holds in memory, however slow it is: the rest waits in the store.
_PAGE_EVENTS = 200
_LOG_CHUNK_BYTES = 64 << 10
_LOG_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class LogPiece:
    """Bytes of an attempt's log, and where the next ones start."""

    data: bytes
    next_offset: int
    attempt: int


class Streams:
    """Events from the store, logs from the run directories."""

    def __init__(self, store: Store, runs: Path, bells: ChangeNotifier) -> None:
        self._store = store
        self._runs = runs
        self._bells = bells

    async def events(self, text: str, after_seq: int) -> AsyncIterator[JobEvent]:
        """Every event after `after_seq`, then live until the job is over and all has been told."""
        job = self._store.resolve(text)
        if after_seq > job.last_seq:
            raise InvalidInput(
                f"job {job.id} has no event {after_seq} yet", field="after_seq", hint="start from 0"
            )
        while True:
            bell = self._bells.of(job.id)
            page = self._store.events(job.id, after_seq, _PAGE_EVENTS)
            for event in page:
                yield event
                after_seq = event.seq
            if page:
                continue
            # A terminal event may be followed by a resume: only the last one ends the stream.
            if self._store.job(job.id).state in TERMINAL:
                return
            await bell.wait()

    async def log(
        self, text: str, *, attempt: int, after_offset: int, follow: bool, tail_lines: int
    ) -> AsyncIterator[LogPiece]:
        """The log of an attempt (0: the newest) from an offset, or its last lines, on."""
        job = self._store.resolve(text)
        attempt = attempt or job.attempt
        if attempt > job.attempt:
            raise NotFound(f"job {job.id} has made {job.attempt} attempts", field="attempt")
        run = RunDirectory(self._runs / job.id)
        require_files(job, run)
        path = run.log_file(attempt)
        offset = after_offset
        if tail_lines:
            # Off the event loop: the last lines of a log may be most of it.
            offset = await asyncio.to_thread(_tail_offset, path, tail_lines)
        if offset > _size(path):
            raise InvalidInput("beyond the end of the log", field="after_offset")
        while True:
            bell = self._bells.of(job.id)
            # Looked at before the file: what an attempt wrote before it was over is still read.
            over = not follow or _is_over(self._store.job(job.id), attempt)
            data = _read(path, offset)
            offset += len(data)
            if data:
                yield LogPiece(data, offset, attempt)
            elif over:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOG_LOOK_SECONDS):
                        await bell.wait()


def _is_over(job: Job, attempt: int) -> bool:
    return job.attempt != attempt or job.state in TERMINAL


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_LOG_CHUNK_BYTES)
    except FileNotFoundError:
        return b""


def _tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines start."""
    try:
        with path.open("rb") as file:
            return _seek_lines(file, lines)
    except FileNotFoundError:
        return 0


def _seek_lines(file: BinaryIO, lines: int) -> int:
    end = file.seek(0, os.SEEK_END)
    start, newlines = end, 0
    while start > 0:
        size = min(_LOG_CHUNK_BYTES, start)
        start -= size
        file.seek(start)
        block = file.read(size)
        # The newline that ends the file ends the last line; it does not start another.
        place = size - 1 if start + size == end else size
        while (place := block.rfind(b"\n", 0, place)) >= 0:
            newlines += 1
            if newlines == lines:
                return start + place + 1
    return 0
