"""Live streams of a job's events and of an attempt's log."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from clients.data.outside import open_regular
from clients.jobs.artifacts import require_files
from clients.jobs.job import TERMINAL, Job, JobEvent
from clients.runs.directory import RunDirectory
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from protos.errors import InvalidInput, NotFound

# Limits of the memory for one watcher, however slowly the watcher reads.
_PAGE_EVENTS = 200
_LOG_CHUNK_BYTES = 64 << 10
_LOG_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class LogPiece:
    """Bytes of an attempt's log. `next_offset` is the file offset of the byte after the piece."""

    data: bytes
    next_offset: int
    attempt: int


class Streams:
    """Streams events from the store and logs from the run directories.

    Both streams raise Unavailable if the server stops while the stream waits. The stream of a log
    also raises Unavailable if the run directory does not answer.
    """

    def __init__(
        self, store: JobStore, runs: Path, notifier: ChangeNotifier, files: RunFiles | None = None
    ) -> None:
        self._store = store
        self._runs = runs
        self._notifier = notifier
        self.files = files or RunFiles()

    async def events(self, text: str, after_seq: int) -> AsyncIterator[JobEvent]:
        """Yield every event after `after_seq`, then new events until the job has ended.

        `text` is a job's id, prefix or `@last`. Raises NotFound if there is no such job,
        InvalidInput if the job has no event `after_seq` yet.
        """
        job = self._store.resolve(text)
        if after_seq > job.last_seq:
            raise InvalidInput(
                f"job {job.id} has no event {after_seq} yet: its last event is {job.last_seq}",
                field="after_seq",
                hint="use 0 to start from the first event",
            )
        while True:
            change_event = self._notifier.next_change(job.id)
            page = self._store.events(job.id, after_seq, _PAGE_EVENTS)
            for event in page:
                yield event
                after_seq = event.seq
            if page:
                continue
            # A resume may follow a terminal event, so the stream ends only if the job's current
            # state is terminal and all events were sent.
            if self._store.job(job.id).state in TERMINAL:
                return
            await change_event.wait()

    async def log(
        self, text: str, *, attempt: int, after_offset: int, follow: bool, tail_lines: int
    ) -> AsyncIterator[LogPiece]:
        """Yield the log of an attempt; `attempt` 0 is the newest attempt.

        The log starts at byte `after_offset`, or `tail_lines` lines before its end. With `follow`,
        the stream stays open until the end of the attempt. Raises NotFound if the job or the
        attempt does not exist, InvalidInput if the offset is beyond the end of the file.
        """
        job = self._store.resolve(text)
        attempt = attempt or job.attempt
        if attempt > job.attempt:
            raise NotFound(
                f"job {job.id} has no attempt {attempt}: its newest attempt is {job.attempt}",
                field="attempt",
            )
        run = RunDirectory(self._runs / job.id)
        path = run.log_file(attempt)
        offset = after_offset
        await self.files.call(partial(require_files, job, run))
        if tail_lines:
            offset = await self.files.call(partial(_tail_offset, path, tail_lines))
        if offset > await self.files.call(partial(_file_size, path)):
            raise InvalidInput(
                "the offset is beyond the end of the log",
                field="after_offset",
                hint="use 0 to start from the beginning",
            )
        while True:
            change_event = self._notifier.next_change(job.id)
            # Check this before reading the file, so that the last bytes of an ended attempt are
            # still read.
            is_over = not follow or _is_over(self._store.job(job.id), attempt)
            chunk = await self.files.call(partial(_read_chunk, path, offset))
            offset += len(chunk)
            if chunk:
                yield LogPiece(chunk, offset, attempt)
            elif is_over:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOG_LOOK_SECONDS):
                        await change_event.wait()


def _is_over(job: Job, attempt: int) -> bool:
    return job.attempt != attempt or job.state in TERMINAL


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_chunk(path: Path, offset: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.read(_LOG_CHUNK_BYTES)
    except OSError:
        return b""


def _tail_offset(path: Path, lines: int) -> int:
    """Return the offset at which the last `lines` lines start."""
    try:
        with open_regular(path) as file:
            return _seek_lines(file, lines)
    except OSError:
        return 0


def _seek_lines(file: BinaryIO, lines: int) -> int:
    end = file.seek(0, os.SEEK_END)
    start, newlines = end, 0
    while start > 0:
        size = min(_LOG_CHUNK_BYTES, start)
        start -= size
        file.seek(start)
        block = file.read(size)
        # A newline at the end of the file belongs to the last line, so it is not counted.
        position = size - 1 if start + size == end else size
        while (position := block.rfind(b"\n", 0, position)) >= 0:
            newlines += 1
            if newlines == lines:
                return start + position + 1
    return 0
