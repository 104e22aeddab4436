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
_SECONDS_BETWEEN_QUERIES = 1.0
# Maximum number of points that a chart gets for the steps before the page was opened.
_MAX_POINTS = 1500
_HEARTBEAT_SECONDS = 15.0

Messages = AsyncGenerator[str, None]
_Answer = TypeVar("_Answer")


def feed(messages: Messages) -> StreamingResponse:
    """Return the response that streams the messages.

    A DistillError ends the stream with a `fault` message.
    """
    return StreamingResponse(
        _add_heartbeats(_add_fault_message(messages)), media_type="text/event-stream"
    )


def message(kind: str, payload: Any, last_id: str = "") -> str:
    """Format one server-sent event. Its data is JSON, which contains no line breaks."""
    id_line = f"id: {last_id}\n" if last_id else ""
    return f"{id_line}event: {kind}\ndata: {json.dumps(payload)}\n\n"


async def job_messages(
    store: JobStore, notifier: ChangeNotifier, job_id: str, after_seq: int
) -> Messages:
    """Yield `steps` messages: lists of a job's events after `after_seq`.

    Events before the call are merged to about 1,500 points; later events are sent unchanged. The
    stream ends only when the server stops.
    """
    last_old_seq = store.job(job_id).last_seq
    group = -(-(last_old_seq - after_seq) // _MAX_POINTS)
    seq = after_seq
    while True:
        change_event = notifier.next_change(job_id)
        page = store.events(job_id, seq, _PAGE_EVENTS)
        if not page:
            await change_event.wait()
            continue
        records = [
            event_record(event)
            for event in thin_for_chart(page, group if seq < last_old_seq else 1)
        ]
        seq = page[-1].seq
        yield message("steps", records, str(seq))
        # Let other tasks run: a long history has many pages.
        await asyncio.sleep(0)


class Turns:
    """Limits queries over all jobs to half of the event loop's time.

    Such a query blocks the loop: a search in ten thousand jobs takes 30 ms. Queries run one at a
    time, with a pause after each query that is as long as the query.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run_query(self, query: Callable[[], _Answer]) -> _Answer:
        """Wait for this query's turn, run it and return its result."""
        async with self._turn:
            started_at = time.monotonic()
            answer = query()
            await asyncio.sleep(time.monotonic() - started_at)
            return answer


async def list_messages(
    notifier: ChangeNotifier, turns: Turns, query: Callable[[], Any]
) -> Messages:
    """Yield the result of `query` as a `page` message, first at once and then after each change.

    Running jobs change with every step, so queries are at least a second apart. The stream ends
    only when the server stops.
    """
    last_page: Any = None
    while True:
        change_event = notifier.next_change(ANY_JOB)
        page = await turns.run_query(query)
        if page != last_page:
            last_page = page
            yield message("page", page)
        await change_event.wait()
        await asyncio.sleep(_SECONDS_BETWEEN_QUERIES)


async def log_messages(pieces: AsyncIterator[LogPiece]) -> Messages:
    """Yield the log as `text` messages with id ATTEMPT:OFFSET; `over` is the last message."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in pieces:
        text = decoder.decode(piece.data)
        yield message("text", text, f"{piece.attempt}:{piece.next_offset}")
    yield message("over", None)


def thin_for_chart(events: Sequence[JobEvent], group: int) -> list[JobEvent]:
    """Merge each `group` consecutive events of an attempt into the last event of the group.

    Each metric becomes its mean over the events that have it, so the metrics of an evaluation are
    not lost.
    """
    thinned_events: list[JobEvent] = []
    pending: list[JobEvent] = []
    for event in events:
        if pending and (len(pending) >= group or event.attempt != pending[-1].attempt):
            thinned_events.append(_merge_events(pending))
            pending = []
        pending.append(event)
    return [*thinned_events, _merge_events(pending)] if pending else thinned_events


def _merge_events(events: Sequence[JobEvent]) -> JobEvent:
    samples_by_name: dict[str, list[float]] = {}
    for event in events:
        for name, sample in event.metrics.items():
            samples_by_name.setdefault(name, []).append(sample)
    means = {name: sum(samples) / len(samples) for name, samples in samples_by_name.items()}
    return replace(events[-1], metrics=means)


async def _add_fault_message(messages: Messages) -> Messages:
    async with contextlib.aclosing(messages):
        try:
            async for text in messages:
                yield text
        except DistillError as fault:
            yield message("fault", fault_record(fault))


async def _add_heartbeats(messages: Messages) -> Messages:
    """Add a comment after 15 s without a message, so that clients can detect a lost connection."""
    next_message: asyncio.Future[str] | None = None
    try:
        while True:
            next_message = next_message or asyncio.ensure_future(anext(messages))
            completed_futures, _ = await asyncio.wait({next_message}, timeout=_HEARTBEAT_SECONDS)
            if not completed_futures:
                yield ":\n\n"
                continue
            finished_message, next_message = next_message, None
            try:
                yield finished_message.result()
            except StopAsyncIteration:
                return
    finally:
        if next_message is not None:
            next_message.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await next_message
        await messages.aclose()
