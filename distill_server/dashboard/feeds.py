"""Server-sent events: the list of jobs; a job's steps and an attempt's log, from where a reader
left off: their messages carry ids, and a reader that comes back sends the last one as
`Last-Event-ID`.
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
from distill_server.jobs.store import Store
from distill_server.rpc.streams import LogPiece
from protos.errors import DistillError

_PAGE_EVENTS = 200
_SECONDS_BETWEEN_LOOKS = 1.0
# What a page needs for its curves of what is past, however long the job is.
_MOST_POINTS = 1500
_HEARTBEAT_SECONDS = 15.0

Messages = AsyncGenerator[str, None]
_Seen = TypeVar("_Seen")


def feed(messages: Messages) -> StreamingResponse:
    """The answer that sends the messages, and tells of a fault as the last one of them."""
    return StreamingResponse(_kept_alive(_told(messages)), media_type="text/event-stream")


def message(kind: str, value: Any, last_id: str = "") -> str:
    """One event; JSON has no line breaks of its own."""
    head = f"id: {last_id}\n" if last_id else ""
    return f"{head}event: {kind}\ndata: {json.dumps(value)}\n\n"


async def job_messages(
    store: Store, bells: ChangeNotifier, job_id: str, after_seq: int
) -> Messages:
    """`steps`: lists of events, those of the past thinned; it ends with the server only."""
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
        # A long history is many pages, and others use this loop.
        await asyncio.sleep(0)


class Turns:
    """Of those who look at all jobs, on the loop that also serves everybody else: one at a time,
    and then the others have as long. A search in ten thousand jobs takes 30 ms.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, look: Callable[[], _Seen]) -> _Seen:
        async with self._turn:
            began = time.monotonic()
            seen = look()
            await asyncio.sleep(time.monotonic() - began)
            return seen


async def list_messages(bells: ChangeNotifier, turns: Turns, look: Callable[[], Any]) -> Messages:
    """`page`: what `look` sees, whenever that is something else; it ends with the server only.

    Running jobs change with every step: looks are a second apart.
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
    """`text` with id ATTEMPT:OFFSET, then `over`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in pieces:
        text = decoder.decode(piece.data)
        yield message("text", text, f"{piece.attempt}:{piece.next_offset}")
    yield message("over", None)


def thinned(events: Sequence[JobEvent], group: int) -> list[JobEvent]:
    """Every `group` successive events of an attempt as their last one, with the means of their
    metrics: an evaluation among them is kept.
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
    """The messages, and a comment now and then: silence means a broken connection."""
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
