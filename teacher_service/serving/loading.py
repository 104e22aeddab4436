"""The service of a teacher that is loading its model: it listens, and reports the progress."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from clients.runs.launch import PROGRESS
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import Unavailable
from protos.program.logs import fields
from teacher_service.models.load_progress import LoadProgress
from teacher_service.serving.service import TeacherServicer

log = logging.getLogger(__name__)

_LOG_SECONDS = 2.0

_T = TypeVar("_T")


class LoadingServicer(teacher_pb2_grpc.TeacherServicer):
    """The service distill.v1.Teacher, from the start of the process.

    Until `set_teacher` is called, every method raises Unavailable with the progress of the load.
    Then the methods of the loaded teacher are called.
    """

    def __init__(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._teacher: TeacherServicer | None = None

    def set_teacher(self, teacher: TeacherServicer) -> None:
        """Pass all calls to `teacher` from now on."""
        self._teacher = teacher

    async def GetInfo(
        self, request: teacher_pb2.GetInfoRequest, context: Any
    ) -> teacher_pb2.TeacherInfo:
        """Return identity, limits and load of the loaded teacher."""
        return await self._loaded_teacher().GetInfo(request, context)

    async def GetVocabulary(
        self, request: teacher_pb2.GetVocabularyRequest, context: Any
    ) -> AsyncIterator[teacher_pb2.VocabularyChunk]:
        """Stream the tokens of the loaded teacher in order of id."""
        async for chunk in self._loaded_teacher().GetVocabulary(request, context):
            yield chunk

    async def Score(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[teacher_pb2.ScoreChunk]:
        """Stream the rows for each request of the stream; see TeacherServicer."""
        async for chunk in self._loaded_teacher().Score(request_iterator, context):
            yield chunk

    async def PushWeights(
        self, request_iterator: Any, context: Any
    ) -> teacher_pb2.PushWeightsReply:
        """Apply a weight update to the loaded teacher."""
        return await self._loaded_teacher().PushWeights(request_iterator, context)

    def _loaded_teacher(self) -> TeacherServicer:
        if self._teacher is None:
            raise build_loading_error(self._progress)
        return self._teacher


def build_loading_error(progress: LoadProgress) -> Unavailable:
    """Return the error for calls during the load."""
    return Unavailable(f"the model is loading ({progress})", hint="wait until the model is loaded")


async def log_progress(progress: LoadProgress) -> None:
    """Log the progress every two seconds, if it has changed, until cancelled.

    A job server reads these lines, see PROGRESS in clients/runs/launch.py.
    """
    last_stage = ""
    while True:
        await asyncio.sleep(_LOG_SECONDS)
        if (stage := str(progress)) != last_stage:
            log.info(PROGRESS, extra=fields(stage=stage))
            last_stage = stage


async def run_in_thread(work: Callable[[], _T], stop: asyncio.Event) -> _T | None:
    """Run `work` in a thread and return its result; None if `stop` is set before the end of `work`.

    The thread is a daemon, so a program can stop without waiting for the thread. An error of `work`
    is raised here.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def set_outcome(result: _T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as work_error:  # noqa: BLE001 (the event loop raises it)
            error = work_error
        loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    stop_waiter = asyncio.create_task(stop.wait())
    futures: list[asyncio.Future[Any]] = [outcome, stop_waiter]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    stop_waiter.cancel()
    await asyncio.sleep(0)  # let the event loop handle a signal that came before the outcome
    if stop.is_set():
        outcome.cancel()
        return None
    return outcome.result()
