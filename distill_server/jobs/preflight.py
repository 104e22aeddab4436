"""What a job's program would refuse at its start, asked before the job is queued."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from clients.config.common import TrainingJob
from clients.config.kinds import AnyJob
from clients.preflight.files import check_here
from clients.preflight.teachers import check_teachers, field_of, label_of, services_of
from clients.teacher.client import TeacherClient, TeacherInfo
from distill_server.jobs.student_tokens import StudentTokens
from protos.errors import Forbidden, Unauthenticated, WrongState

log = logging.getLogger(__name__)

# Raises a DistillError. The path: of the run directory, or what it will be made in.
Preflight: TypeAlias = Callable[[AnyJob, Path], Awaitable[None]]

# A teacher has 5 s to answer, a caller waits 10 s for us.
_MOST_SECONDS = 8.0
# So many submits a second must not be as many questions to a teacher.
_FRESH_SECONDS = 3.0
_LOOKERS, _ASKERS = 4, 16
_REMEDY = "give the path of a file or directory that the machine of the distill server has"

_T = TypeVar("_T")


async def unchecked(config: AnyJob, run: Path) -> None:
    """For trainers that are none: whatever they are given is right."""


class JobPreflight:
    """Looks at files in threads of its own, and asks each teacher once for all who submit."""

    def __init__(self) -> None:
        self._lookers = ThreadPoolExecutor(_LOOKERS, "preflight-files")
        # Of their own: who looks at files must not wait for teachers that are dead.
        self._askers = ThreadPoolExecutor(_ASKERS, "preflight-teachers")
        self._tokens = StudentTokens()
        # By addresses and the job's key for them: who asks, and when it began.
        self._asked: dict[tuple[tuple[str, ...], str], tuple[asyncio.Task[TeacherInfo], float]] = {}

    async def __call__(self, config: AnyJob, run: Path) -> None:
        """Refuse a job that cannot run, as its program would. What a hanging disk does not tell in
        time is left to that program.
        """
        try:
            async with asyncio.timeout(_MOST_SECONDS) as limit:
                await _apart(self._lookers, lambda: check_here(config, run, hint=_REMEDY))
                names = services_of(config)
                asked = (self._info(names[name], field_of(name)) for name in names)
                infos = dict(zip(names, await asyncio.gather(*asked), strict=True))
                await _apart(self._askers, lambda: self._hold_against(config, infos))
        except TimeoutError:
            if not limit.expired():  # a teacher's own answer
                raise
            log.warning("a job was not looked at within %g s: its start will tell", _MOST_SECONDS)

    async def _info(self, addresses: str | list[str], field: str) -> TeacherInfo:
        key = (tuple([addresses] if isinstance(addresses, str) else addresses), field)
        task, began = self._asked.get(key, (None, 0.0))
        now = time.monotonic()
        if task is None or (task.done() and (now - began > _FRESH_SECONDS or task.exception())):
            task = asyncio.create_task(_apart(self._askers, lambda: _ask(addresses, field)))
            task.add_done_callback(lambda done: done.exception())  # perhaps nobody waits any more
            fresh = {k: v for k, v in self._asked.items() if now - v[1] <= _FRESH_SECONDS}
            self._asked = {**fresh, key: (task, now)}
        # Others wait for it too, whoever gives up.
        return await asyncio.shield(task)

    def _hold_against(self, config: AnyJob, infos: Mapping[str, TeacherInfo]) -> None:
        check_teachers(config, infos)
        if not isinstance(config, TrainingJob):
            return
        student = Path(config.student.model)
        for name, addresses in services_of(config).items():
            vocabulary = partial(_vocabulary, addresses, field_of(name))
            self._tokens.check(student, infos[name], label_of(name), vocabulary)


async def _apart(threads: ThreadPoolExecutor, look: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, look)


def _client(addresses: str | list[str], field: str) -> TeacherClient:
    # Whoever submits names the address: it must not get a token that can do more than a trainer's.
    return TeacherClient(addresses, field=field, scope="preflight", patience_seconds=_MOST_SECONDS)


def _vocabulary(addresses: str | list[str], field: str) -> Sequence[str]:
    with _client(addresses, field) as client:
        return client.vocabulary()


def _ask(addresses: str | list[str], field: str) -> TeacherInfo:
    with _client(addresses, field) as client:
        try:
            return client.info()
        except (Unauthenticated, Forbidden) as error:
            # The caller's own token is another one, and is good.
            where = addresses if isinstance(addresses, str) else ", ".join(addresses)
            raise WrongState(
                f"the teacher at {where} does not take the token of the distill server",
                field=field,
                hint="start the server with the teacher's $DISTILL_TEACHER_TOKEN",
            ) from error
