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
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.responses import StreamingResponse

from distill_server.dashboard.responses import event_columns, extremes_record, fault_record
from distill_server.jobs.change_notifier import ANY_JOB, ChangeNotifier
from distill_server.jobs.store import JobStore
from distill_server.rpc.streams import LogPiece
from protos.errors import DistillError

_PAGE_EVENTS = 500
_SECONDS_BETWEEN_QUERIES = 1.0
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
    """Yield `steps` messages: the job's events after `after_seq`, in columns (responses.py).

    If the stream starts with the first event, its first message is `extremes`: `attempt`, and by
    metric the lists of steps and values. The stream ends only when the server stops.
    """
    seq = after_seq
    if not seq:
        yield message("extremes", extremes_record(store.extremes(job_id)))
    while True:
        change_event = notifier.next_change(job_id)
        page = store.events(job_id, seq, _PAGE_EVENTS)
        if not page:
            await change_event.wait()
            continue
        seq = page[-1].seq
        yield message("steps", event_columns(page), str(seq))
        # Let other tasks run: a long history has many pages.
        await asyncio.sleep(0)


def stored_steps(store: JobStore, job_id: str, after_seq: int) -> dict[str, Any]:
    """Return the stored events of a job after `after_seq`, in columns, as a JSON record.

    The record also has `state` and `last_seq` of the job, and its `extremes` if `after_seq` is 0,
    else null: pages read new steps every few seconds, and already have the extremes.
    """
    job = store.job(job_id)
    return {
        "state": job.state,
        "last_seq": job.last_seq,
        "extremes": None if after_seq else extremes_record(store.extremes(job_id)),
        "events": event_columns(store.events(job_id, after_seq, -1)),
    }


class Turns:
    """Lets queries over all jobs use at most half of the event loop's time.

    A query over all jobs blocks the loop: a search in ten thousand jobs takes 30 ms. Queries run
    one at a time. After each query there is a pause, which is as long as the query.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run_query(self, query: Callable[[], _Answer]) -> _Answer:
        """Wait until no other query runs, then run `query` and return its result."""
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
    """Yield the log as `text` messages with the id ATTEMPT:OFFSET, and then one `over` message."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for piece in pieces:
        text = decoder.decode(piece.data)
        yield message("text", text, f"{piece.attempt}:{piece.next_offset}")
    yield message("over", None)


async def _add_fault_message(messages: Messages) -> Messages:
    async with contextlib.aclosing(messages):
        try:
            async for text in messages:
                yield text
        except DistillError as fault:
            yield message("fault", fault_record(fault))


async def _add_heartbeats(messages: Messages) -> Messages:
    """Yield the messages, and a comment after every 15 s without a message.

    With the comments, clients can detect a lost connection.
    """
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
