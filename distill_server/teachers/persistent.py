"""Starts and stops teachers for users; jobs with the same model and options share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from clients.config.tables.teacher import TeacherLink
from clients.data.object_urls import is_object_url
from distill_server.jobs.run_files import RunFiles
from distill_server.runners.machine import Machine, Share
from distill_server.teachers.home import key_of, options_of
from distill_server.teachers.started import StartedTeachers, TeacherProcess
from protos.errors import InvalidInput, NotFound, WrongState


class PersistentTeachers:
    """Teachers that run until a user stops them. Call all methods on the event loop."""

    def __init__(
        self,
        teachers: StartedTeachers,
        machine: Machine,
        files: RunFiles,
        list_shares: Callable[[], Sequence[Share]],
    ) -> None:
        """`list_shares` returns the shares of the machine that jobs and teachers hold."""
        self._teachers = teachers
        self._machine = machine
        self._files = files
        self._list_shares = list_shares

    async def start(self, teacher_json: str) -> TeacherProcess:
        """Start a teacher, or keep one that runs for jobs; repeated calls have no effect.

        `teacher_json` is the table `teacher` of a job, with `model`. Raises InvalidInput if it is
        not valid, and WrongState if the machine has too few free GPUs now.
        """
        config = _parse_teacher(teacher_json)
        self._machine.require_teachers()
        key = await self._files.start(partial(key_of, config))
        teacher = self._teachers.touch(key)
        if teacher is None or teacher.failure:
            try:
                return self._teachers.start(key, config, self._list_shares(), kept=True)
            except LookupError as lack:
                raise WrongState(
                    f"the server has no room for it: it would wait for {lack}",
                    field="teacher.model",
                    hint="stop another one (distill teacher down), or wait for the end of jobs",
                ) from lack
        if teacher.is_stopping:
            raise WrongState(
                f"teacher {key} is stopping", field="teacher.model", hint="try again in a moment"
            )
        await self._teachers.set_kept(teacher, kept=True)
        return teacher

    async def stop(self, text: str) -> TeacherProcess:
        """Stop a teacher, or let it end with its last job. `text` is its key or a prefix of it."""
        matches = [teacher for teacher in self._teachers if text and teacher.key.startswith(text)]
        if not matches:
            raise NotFound(
                f"the server runs no teacher {text!r}",
                field="key",
                hint="distill teacher ls lists the keys",
            )
        if len(matches) > 1:
            keys = ", ".join(sorted(teacher.key for teacher in matches))
            raise InvalidInput(
                f"{text!r} is ambiguous: {keys}", field="key", hint="give more of it"
            )
        (teacher,) = matches
        await self._teachers.set_kept(teacher, kept=False)
        self._teachers.stop_if_unused(teacher)
        return teacher


def _parse_teacher(teacher_json: str) -> TeacherLink:
    try:
        config = TeacherLink.model_validate_json(teacher_json, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(["teacher", *map(str, problem["loc"])])
        raise InvalidInput(problem["msg"], field=field) from error
    if config.model is None:
        raise InvalidInput("names no model", field="teacher.model", hint="name one")
    if is_object_url(config.model):
        raise InvalidInput(
            f"is not read from an object storage: {config.model}",
            field="teacher.model",
            hint="copy it to a disk",
        )
    if config.model.startswith(("/", "./", "../")) and not Path(config.model).exists():
        raise InvalidInput(
            f"no such file: {config.model}",
            field="teacher.model",
            hint="name a directory that exists on the distill server's machine",
        )
    return options_of(config)
