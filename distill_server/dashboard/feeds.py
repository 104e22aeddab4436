"""Server-sent event streams: the list of jobs, a job's events and the log of an attempt.

Messages of events and logs carry ids. A client that reconnects sends its last id as `Last-Event-ID`
and receives the messages after it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import StreamingResponse

from clients.jobs.job import JobEvent
from distill_server.dashboard.responses import event_record, fault_record
from distill_server.jobs.change_notifier import ANY_JOB, ChangeNotifier
from distill_server.jobs.store import JobStore
from distill_server.rpc.streams import LogPiece
from protos.errors import DistillError

_PAGE_EVENTS = 200
_SECONDS_BETWEEN_LOOKS = 1.0
# The number of points sent for the steps before the page was opened, for jobs of any length.
_MOST_POINTS = 1500
_HEARTBEAT_SECONDS = 15.0

Messages = AsyncGenerator[str, None]
_Seen = TypeVar("_Seen")


def feed(messages: Messages) -> StreamingResponse:
    """Return the response that streams the messages.

    A DistillError ends the stream with a `fault` message.
    """
    return StreamingResponse(_kept_alive(_told(messages)), media_type="text/event-stream")


def message(kind: str, value: Any, last_id: str = "") -> str:
    """Format one server-sent event. Its data is JSON, which contains no line breaks."""
    head = f"id: {last_id}\n" if last_id else ""
    return f"{head}event: {kind}\ndata: {json.dumps(value)}\n\n"


async def job_messages(
    store: JobStore, bells: ChangeNotifier, job_id: str, after_seq: int
) -> Messages:
    """Yield `steps` messages: lists of a job's events after `after_seq`.

    Events before the call are thinned to about 1,500 points; later ones are sent as they come. The
    stream ends only when the server stops.
    """
    until = store.job(job_id).last_seq
    group = -(-(until - after_seq) // _MOST_POINTS)
    seq = after_seq
    while True:
        bell = bells.of(job_id)
        page = store.events(job_id, seq, _PAGE_EVENTS)
        if not page:
            await bell.wait()
            continue
        records = [event_record(event) for event in thinned(page, group if seq < until else 1)]
        seq = page[-1].seq
        yield message("steps", records, str(seq))
        # Let other tasks run: a long history is many pages.
        await asyncio.sleep(0)


class Turns:
    """Limits queries over all jobs to half of the event loop's time.

    Such a query blocks the loop: a search in ten thousand jobs takes 30 ms. Queries run one at a
    time, and after each one other tasks get the loop for as long as the query took.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, look: Callable[[], _Seen]) -> _Seen:
        """Wait for this query's turn, run it and return its result."""
        async with self._turn:
            began = time.monotonic()
            seen = look()
            await asyncio.sleep(time.monotonic() - began)
            return seen


async def list_messages(bells: ChangeNotifier, turns: Turns, look: Callable[[], Any]) -> Messages:
    """Yield `page` messages: the result of `look`, each time it differs from the last one.

    Running jobs change with every step, so queries are at least a second apart. The stream ends
    only when the server stops.
    """
    seen: Any = None
    while True:
        bell = bells.of(ANY_JOB)
        found = await turns.take(look)
        if found != seen:
            seen = found
            yield message("page", found)
        await bell.wait()
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)


async def log_messages(pieces: AsyncIterator[LogPiece]) -> Messages:
    """Yield `text` messages with id ATTEMPT:OFFSET, and `over` at the end of the attempt."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in pieces:
        text = decoder.decode(piece.data)
        yield message("text", text, f"{piece.attempt}:{piece.next_offset}")
    yield message("over", None)


def thinned(events: Sequence[JobEvent], group: int) -> list[JobEvent]:
    """Merge each `group` consecutive events of an attempt into the last one of the group.

    Each metric becomes its mean over the events that have it, so the metrics of an evaluation are
    kept.
    """
    kept: list[JobEvent] = []
    pending: list[JobEvent] = []
    for event in events:
        if pending and (len(pending) >= group or event.attempt != pending[-1].attempt):
            kept.append(_merged(pending))
            pending = []
        pending.append(event)
    return [*kept, _merged(pending)] if pending else kept


def _merged(events: Sequence[JobEvent]) -> JobEvent:
    values: dict[str, list[float]] = {}
    for event in events:
        for name, value in event.metrics.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(found) / len(found) for name, found in values.items()}
    return replace(events[-1], metrics=means)


async def _told(messages: Messages) -> Messages:
    async with contextlib.aclosing(messages):
        try:
            async for text in messages:
                yield text
        except DistillError as fault:
            yield message("fault", fault_record(fault))


async def _kept_alive(messages: Messages) -> Messages:
    """Add a comment after 15 s without a message, so that clients can detect a lost connection."""
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(messages))
            done, _ = await asyncio.wait({pending}, timeout=_HEARTBEAT_SECONDS)
            if not done:
                yield ":\n\n"
                continue
            finished, pending = pending, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending
        await messages.aclose()
