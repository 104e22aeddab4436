"""Checks of a job before it is queued: files, teachers, tokenizers and rollout services.

The trainer repeats these checks at its start; the preflight reports faults at submission.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from clients.config.kinds import AnyJob
from clients.data.models.shape import logits_in
from clients.data.tokens.tokenizer import first_difference, tokens_in
from clients.preflight.files import check_here
from clients.preflight.limits import fit_limits, resumed_limits
from clients.preflight.rollouts import check_rollouts
from clients.preflight.teachers import (
    adapter_of,
    check_teachers,
    contexts_of,
    field_of,
    label_of,
    services_of,
)
from clients.preflight.vocabulary import common_ids, other_tokenizer, require_narrowing
from clients.teacher.client import TeacherClient
from clients.teacher.info import TeacherInfo
from clients.teacher.query import tokenizer_fingerprint
from distill_server.uploads import name_uploads
from protos.errors import DistillError, Forbidden, Unauthenticated, WrongState

_MAX_CACHED = 256

log = logging.getLogger(__name__)
# Raises a DistillError. The path is the run directory, or for a new job the directory of all runs.
Preflight: TypeAlias = Callable[[AnyJob, Path], Awaitable[None]]
# More than the time limit of a teacher's answer (5 s), less than the time that a client waits
# (10 s).
_MAX_SECONDS = 8.0
# A teacher's info is reused this long, so that a burst of submits causes one request per teacher.
_FRESH_SECONDS = 3.0
_FILE_THREADS, _TEACHER_THREADS = 4, 16
_REMEDY = (
    "name a file or directory that exists on the distill server's machine, or send yours:"
    " distill submit --upload"
)
_T = TypeVar("_T")


class StudentTokens:
    """Compares students with teachers. A result is cached until the student or the teacher changes.

    Thread-safe.
    """

    def __init__(self) -> None:
        # Reading a large vocabulary holds the GIL for about 0.1 s, so one thread at a time reads.
        self._lock = threading.Lock()
        self._differences: dict[tuple[str, int, int, str], str] = {}

    def check(
        self, model: Path, info: TeacherInfo, label: str, vocabulary: Callable[[], Sequence[str]]
    ) -> None:
        """Check the model directory of a student against the teacher's info.

        `vocabulary` requests the teacher's tokens; it is called only if the fingerprints of the
        tokenizers differ. Raises WrongState if a token certainly differs, or if the numbers of
        logits differ by more than padding.
        """
        difference = self._find_difference(model, info.tokenizer_fingerprint, vocabulary)
        if difference:
            raise other_tokenizer(difference, label)
        width = logits_in(model)
        if width is not None and width != info.vocab_size:
            with self._lock:
                tokens = tokens_in(model) or []
            shared_ids = common_ids(width, info.vocab_size, label, tokens)
            require_narrowing(info, shared_ids, label, "student.model")

    def _find_difference(
        self, model: Path, fingerprint: str, vocabulary: Callable[[], Sequence[str]]
    ) -> str:
        """Return a sentence about a difference that is certain; "" if none is certain."""
        try:
            file_stat = (model / "tokenizer.json").stat()
        except OSError:
            return ""
        key = (str(model), file_stat.st_mtime_ns, file_stat.st_size, fingerprint)
        with self._lock:
            if key in self._differences:
                return self._differences[key]
            tokens = tokens_in(model)
            if tokens is None or tokenizer_fingerprint(tokens) == fingerprint:
                return self._cache_difference(key, "")
        # Outside the lock: a slow teacher must not delay the checks against other teachers.
        difference = _compare_tokens(tokens, vocabulary())
        with self._lock:
            return self._cache_difference(key, difference)

    def _cache_difference(self, key: tuple[str, int, int, str], difference: str) -> str:
        if len(self._differences) >= _MAX_CACHED:
            self._differences.clear()
        self._differences[key] = difference
        return difference


def _compare_tokens(student_tokens: Sequence[str], teacher_tokens: Sequence[str]) -> str:
    """Return a sentence about the first token that certainly differs; "" if there is none."""
    # Another file may name the ids that tokenizer.json leaves empty, so only an id with two
    # different tokens is a difference.
    compared_tokens = [
        student_token or teacher_token
        for student_token, teacher_token in zip(student_tokens, teacher_tokens, strict=False)
    ]
    return (
        ""
        if compared_tokens == [*teacher_tokens[: len(compared_tokens)]]
        else first_difference(teacher_tokens, compared_tokens)
    )


async def accept_all(config: AnyJob, run: Path) -> None:
    """Accept every job; for tests whose trainers are scripts."""


class JobPreflight:
    """Checks jobs in its own threads; concurrent submits share one request to each teacher."""

    def __init__(self, *, trainers_are_local: bool = True) -> None:
        """`trainers_are_local`: trainers run on this machine, with this Python; False for Ray."""
        self._trainers_are_local = trainers_are_local
        self._file_threads = ThreadPoolExecutor(_FILE_THREADS, "preflight-files")
        # A pool of its own, so that checks of files do not wait for teachers that do not answer.
        self._teacher_threads = ThreadPoolExecutor(_TEACHER_THREADS, "preflight-teachers")
        self._tokens = StudentTokens()
        # The request and its start time. A key consists of the teacher's addresses, the field of
        # the job that contains them, and the adapter.
        self._requests: dict[
            tuple[tuple[str, ...], str, str], tuple[asyncio.Task[TeacherInfo], float]
        ] = {}

    async def __call__(self, config: AnyJob, run: Path) -> None:
        """Raise the DistillError that the job's program would raise at its start.

        If the checks take more than 8 s, for example because a disk hangs, the job is accepted with
        a warning in the log. The job's program repeats the checks.
        """
        try:
            async with asyncio.timeout(_MAX_SECONDS) as limit:
                await _run_in_thread(
                    self._file_threads,
                    partial(check_here, config, run, hint=_REMEDY, here=self._trainers_are_local),
                )
                names = services_of(config)
                adapter = adapter_of(config)
                info_requests = (
                    self._fetch_info(names[name], field_of(name), adapter) for name in names
                )
                rollouts = partial(_check_rollouts, config, run)
                answers = asyncio.gather(*info_requests)
                await asyncio.gather(_run_in_thread(self._teacher_threads, rollouts), answers)
                infos = dict(zip(names, answers.result(), strict=True))
                await _run_in_thread(
                    self._teacher_threads, lambda: self._compare_with_teachers(config, run, infos)
                )
        except TimeoutError:
            if not limit.expired():  # raised by a check, not by this limit
                raise
            log.warning(
                "a job was not checked within %g s and is accepted; the trainer repeats the check",
                _MAX_SECONDS,
            )
        except DistillError as error:
            error.message = name_uploads(error.message)
            raise

    async def _fetch_info(
        self, addresses: str | list[str], field: str, adapter: str
    ) -> TeacherInfo:
        address_list = [addresses] if isinstance(addresses, str) else addresses
        key = (tuple(address_list), field, adapter)
        task, started_at = self._requests.get(key, (None, 0.0))
        now = time.monotonic()
        if task is None or (
            task.done() and (now - started_at > _FRESH_SECONDS or task.exception())
        ):
            ask = partial(_request_info, addresses, field, adapter)
            task = asyncio.create_task(_run_in_thread(self._teacher_threads, ask))
            # Mark the error as retrieved: all callers may have been cancelled by then.
            task.add_done_callback(lambda finished_task: finished_task.exception())
            recent_requests = {
                request_key: request
                for request_key, request in self._requests.items()
                if now - request[1] <= _FRESH_SECONDS
            }
            self._requests = {**recent_requests, key: (task, now)}
        # Other callers wait for the same task: a cancelled caller must not cancel it.
        return await asyncio.shield(task)

    def _compare_with_teachers(
        self, config: AnyJob, run: Path, infos: Mapping[str, TeacherInfo]
    ) -> None:
        limits = resumed_limits(config, run) or fit_limits(config, contexts_of(infos))
        config = limits.apply(config)
        # A store at a URL is read only by the job's program, with the credentials of a trainer.
        if not config.has_remote_store:
            check_teachers(config, infos)
        # If the teacher may have another tokenizer, the trainer compares the two tokenizers.
        if config.trained_student is None or config.other_tokenizer:
            return
        student = Path(config.trained_student.model)
        for name, addresses in services_of(config).items():
            vocabulary = partial(_fetch_vocabulary, addresses, field_of(name))
            self._tokens.check(student, infos[name], label_of(name), vocabulary)


def _check_rollouts(config: AnyJob, run: Path) -> None:
    limits = resumed_limits(config, run) or fit_limits(config)
    check_rollouts(limits.apply(config), scope="preflight")


async def _run_in_thread(threads: ThreadPoolExecutor, check: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, check)


def _create_client(addresses: str | list[str], field: str, adapter: str = "") -> TeacherClient:
    # The submitter chooses the address, so the token must have no more rights than a trainer's
    # token.
    return TeacherClient(
        addresses, field=field, scope="preflight", patience_seconds=_MAX_SECONDS, adapter=adapter
    )


def _fetch_vocabulary(addresses: str | list[str], field: str) -> Sequence[str]:
    with _create_client(addresses, field) as client:
        return client.vocabulary()


def _request_info(addresses: str | list[str], field: str, adapter: str) -> TeacherInfo:
    with _create_client(addresses, field, adapter) as client:
        try:
            return client.info()
        except (Unauthenticated, Forbidden) as error:
            # WrongState, not Unauthenticated: the caller's own token is valid.
            address_text = addresses if isinstance(addresses, str) else ", ".join(addresses)
            raise WrongState(
                f"the teacher at {address_text} does not accept the token of the distill server",
                field=field,
                hint="start the distill server with $DISTILL_TEACHER_TOKEN set to a token that the"
                " teacher accepts",
            ) from error
