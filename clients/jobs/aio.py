"""`AsyncDistillClient`: a DistillClient for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from clients.jobs.client import DistillClient, JobHandle

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
# Waiting calls have a thread each, and must not delay the others.
_MAX_THREADS = 1024


def _call(
    method: Callable[Concatenate[DistillClient, _P], _Result],
) -> Callable[Concatenate[AsyncDistillClient, _P], Coroutine[Any, Any, _Result]]:
    """Return a coroutine function that calls `method` in a thread."""

    @wraps(method)
    async def call(self: AsyncDistillClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        self._client._connection.require_usable()
        client = copy(self._client)  # a connection of its own, which ends with a cancelled call
        running_call = self._threads.submit(partial(method, client, *args, **kwargs))
        running_call.add_done_callback(lambda _: client.close())
        try:
            result = await asyncio.wrap_future(running_call)
        finally:
            client._connection.cancel()
        for job in result if isinstance(result, list) else [result]:
            if isinstance(job, JobHandle):
                object.__setattr__(job, "client", self._client)
        return result

    return call


def _iterate(
    method: Callable[Concatenate[DistillClient, _P], Iterator[_Result]],
) -> Callable[Concatenate[AsyncDistillClient, _P], AsyncIterator[_Result]]:
    """Return an asynchronous generator function.

    Its generator calls the iterator of `method` in a thread.
    """

    @wraps(method)
    async def iterate(
        self: AsyncDistillClient, /, *args: _P.args, **kwargs: _P.kwargs
    ) -> AsyncIterator[_Result]:
        self._client._connection.require_usable()
        client = copy(self._client)
        iterator = method(client, *args, **kwargs)
        try:
            while True:
                step = self._threads.submit(next, iterator, None)
                if (value := await asyncio.wrap_future(step)) is None:
                    return
                yield value
        finally:
            client._connection.cancel()
            step.add_done_callback(lambda _: client.close())

    return iterate


class AsyncDistillClient:
    """A client of one distill server that does not block the event loop.

    Its methods have the arguments, results and errors of the DistillClient methods with the same
    name. A cancelled call ends at once, but the server may have received it. The methods of a
    returned handle block the event loop: instead of `job.wait()`, use `await client.wait(job.id)`.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout: float = 10.0,
        patience_seconds: float = 60.0,
    ) -> None:
        """Arguments as for DistillClient. The connection opens on the first call."""
        settings = {"timeout": timeout, "patience_seconds": patience_seconds}
        self._copy = partial(AsyncDistillClient, address, **settings)
        self._client = DistillClient(address, **settings)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="distill-client")

    async def __aenter__(self) -> AsyncDistillClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

    submit = _call(DistillClient.submit)
    submit_all = _call(DistillClient.submit_all)
    upload = _call(DistillClient.upload)
    check = _call(DistillClient.check)
    get = _call(DistillClient.get)
    list = _call(DistillClient.list)
    cancel = _call(DistillClient.cancel)
    resume = _call(DistillClient.resume)
    remove = _call(DistillClient.remove)
    pin = _call(DistillClient.pin)
    teachers = _call(DistillClient.teachers)
    history = _call(DistillClient.history)
    wait = _call(DistillClient.wait)
    pull = _call(DistillClient.pull)
    pull_notes = _call(DistillClient.pull_notes)
    watch = _iterate(DistillClient.watch)
    logs = _iterate(DistillClient.logs)

    async def close(self) -> None:
        """Close the connection. Later calls raise WrongState."""
        self._client.close()
        self._threads.shutdown(wait=False)
