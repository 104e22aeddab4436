"""The operations that users request for jobs: check, submit, cancel and resume."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from clients.config.kinds import AnyJob
from clients.config.tables.after import outputs_in
from clients.jobs.artifacts import checkpoint_root, require_files
from clients.jobs.job import Job, JobState
from clients.runs.directory import RunDirectory
from clients.runs.identity import run_ids
from distill_server.jobs.job_file import parse_config
from distill_server.jobs.new_runs import name_run, unnamed_run
from distill_server.jobs.observation import request_stop
from distill_server.jobs.preflight import Preflight, accept_all
from distill_server.jobs.rows import NewJob
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import Attempt, Change, JobStore
from distill_server.pipelines.linking import LinkedJob, link_job, with_known_models
from distill_server.runners.machine import ONE_JOB, Machine
from protos.errors import DistillError, InvalidInput, Overloaded, Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import MAX_SUBMITTED_JOBS

log = logging.getLogger(__name__)

_KEY_CHARS = 200
# Far more than any job file needs. The limit bounds the time of parsing on the event loop.
_TEXT_CHARS = 256 << 10

_STARTED = (JobState.PREPARING, JobState.RUNNING)

# The configuration as JSON, the text of the job file, and the idempotency key.
Submission: TypeAlias = tuple[str, str, str]
# Sends SIGTERM to the trainer of an attempt; blocking.
StopTrainer: TypeAlias = Callable[[RunDirectory, int], None]
# Raises InvalidInput if an owner's quota is below this number of GPUs.
RequireQuota: TypeAlias = Callable[[str, int], None]
# Lets a new job wait for the teacher that the error is about, and returns the job.
LetWait: TypeAlias = Callable[[Job, DistillError], Job]


def _ignore_stop(run: RunDirectory, attempt: int) -> None:
    """Do nothing; for tests without trainers."""


def _allow_gpus(owner: str, gpus: int) -> None:
    """Do nothing; for tests without quotas."""


class JobControl:
    """Validates the requests of users and applies them to the store and the run directories.

    Call all methods on the event loop. A `text` argument names a job: its id, an unambiguous
    prefix of the id, or `@last`.
    """

    def __init__(
        self,
        store: JobStore,
        runs: Path,
        wake: Callable[[], None],
        machine: Machine = ONE_JOB,
        max_queued: int = 10_000,
        preflight: Preflight = accept_all,
        files: RunFiles | None = None,
        stop_trainer: StopTrainer = _ignore_stop,
        let_wait: LetWait | None = None,
        require_quota: RequireQuota = _allow_gpus,
    ) -> None:
        """`wake` wakes the scheduler when there is work.

        - preflight: checks a job before it is queued.
        - max_queued: `submit` and `resume` raise Overloaded if more jobs would be queued.
        - let_wait: queues a job whose teacher is unreachable or loads its model. If it is None,
          such a job is refused.
        - stop_trainer: sends SIGTERM to an attempt whose request to stop cannot be written.
        """
        self._store = store
        self._runs = runs
        self._wake = wake
        self._machine = machine
        self._max_queued = max_queued
        self._preflight = preflight
        self._files = files or RunFiles()
        self._stop_trainer = stop_trainer
        self._let_wait = let_wait
        self._require_quota = require_quota
        self._late_cancels: set[str] = set()
        self._is_stopping = False

    def refuse_new_jobs(self) -> None:
        """Raise Unavailable for all jobs that are submitted or resumed from now on."""
        self._is_stopping = True

    async def check(self, *configs_json: str, owner: str = "") -> None:
        """Raise the errors that `submit_checked` would raise, without queueing the jobs.

        In addition, raises Unavailable if a job would wait for its teacher.
        """
        problems = await self._check_jobs(
            [self._parse_submission(config_json, "", "") for config_json in configs_json], owner
        )
        for problem in filter(None, problems):
            raise problem

    async def submit_checked(
        self, config_json: str, config_text: str, idempotency_key: str, owner: str = ""
    ) -> Job:
        """Run the preflight, then `submit`; for the errors see `submit_all`."""
        return (await self.submit_all([(config_json, config_text, idempotency_key)], owner))[0]

    async def submit_all(self, requests: Sequence[Submission], owner: str = "") -> list[Job]:
        """Run the preflight of all jobs, then queue all of them for `owner`, or none.

        If the idempotency keys were used before, the result is the jobs of their first use, without
        a preflight. A job may depend on earlier jobs of `requests`. Raises InvalidInput,
        WrongState, NotFound, Overloaded or the preflight's DistillError; after an error no job is
        queued.
        """
        configs = [self._parse_submission(*request) for request in requests]
        if known_jobs := self._find_known_jobs(configs, requests):
            return known_jobs
        problems = await self._check_jobs(configs, owner)
        # During the preflight, another request may have used the key or filled the queue.
        return self._find_known_jobs(configs, requests) or self._queue_jobs(
            configs, requests, owner, problems
        )

    def submit(self, config_json: str, config_text: str, idempotency_key: str) -> Job:
        """Queue a job without a preflight; a key that was used before returns its job.

        An empty `idempotency_key` means no key. Raises InvalidInput (with the field) if the job is
        not valid or needs more than the machine has, Overloaded if the queue is full, and
        Unavailable if the job cannot be written.
        """
        requests = [(config_json, config_text, idempotency_key)]
        configs = [self._parse_submission(*request) for request in requests]
        return (self._find_known_jobs(configs, requests) or self._queue_jobs(configs, requests))[0]

    async def cancel(self, text: str, *, now: bool) -> Job:
        """Cancel a job. The trainer first writes a checkpoint, unless `now`.

        A repeated call has no further effect. If the request to stop cannot be written (a full
        disk), the trainer gets SIGTERM, and the state is stored later. Raises NotFound if there is
        no such job, WrongState if the job has succeeded or failed, Unavailable if the new state of
        a queued job cannot be stored.
        """
        job = self._store.resolve(text)
        match job.state:
            case JobState.CANCELLED:
                return job
            case JobState.SUCCEEDED | JobState.FAILED:
                raise WrongState(
                    f"job {job.id} has already {job.state.lower()} and cannot be cancelled",
                    field="job_id",
                )
            case JobState.QUEUED:
                return self._store.change(
                    job.id, Change(JobState.CANCELLED, reason="cancelled while queued", phase="")
                )
        # Store CANCELLING first: the job of a trainer that stops while RUNNING is queued again.
        if job.state is not JobState.CANCELLING:
            job = self._store_cancel(job)
        failpoint("cancel-stored")
        await self._request_stop(job, now=now)
        failpoint("trainer-told")
        self._wake()
        return job

    def _store_cancel(self, job: Job) -> Job:
        """Store the state CANCELLING of a job and return the job.

        If the disk is full, `store_late_cancels` stores the state later.
        """
        try:
            return self._store.change(job.id, Change(JobState.CANCELLING))
        except Unavailable as error:
            log.warning("job %s: cancelled, which is stored later: %s", job.id, error.message)
            self._late_cancels.add(job.id)
            return replace(job, state=JobState.CANCELLING)

    def store_late_cancels(self) -> None:
        """Store the cancels that could not be stored because the disk was full.

        The scheduler calls this before it stores the end of an attempt: otherwise it would start a
        job again whose trainer stopped because of a cancel. Raises Unavailable if the disk is still
        full.
        """
        for job_id in sorted(self._late_cancels):
            if self._store.has(job_id) and self._store.job(job_id).state in _STARTED:
                self._store.change(job_id, Change(JobState.CANCELLING))
            self._late_cancels.discard(job_id)

    async def resume_checked(self, text: str, *, max_steps: int, from_step: int) -> Job:
        """Run the preflight, then `resume`. Also raises the preflight's DistillError."""
        job, config = self._require_resumable(text, max_steps)
        await self._files.call(partial(self._require_files, job, from_step))
        config = config or parse_config(job.config_json)
        outputs = outputs_in(config)
        for output in outputs:
            if not self._store.has(output.job):
                raise WrongState(
                    f"this job reads the {output.kind} of job {output.job}, which was removed",
                    field=output.key,
                    hint="submit the job again with another value",
                )
        if not outputs:
            await self._preflight(config, self._runs / job.id)
        return self._queue_resumed(text, max_steps, from_step)

    def resume(self, text: str, *, max_steps: int, from_step: int) -> Job:
        """Queue a new attempt of a job that has ended, without a preflight.

        `max_steps` 0 keeps the job's number of steps; `from_step` 0 starts from the newest
        checkpoint. Raises NotFound if the job or the checkpoint does not exist, WrongState if the
        job has not ended or has no steps left, InvalidInput if `max_steps` is already reached,
        Overloaded if the queue is full.
        """
        job, _ = self._require_resumable(text, max_steps)
        self._require_files(job, from_step)
        return self._queue_resumed(text, max_steps, from_step)

    def _queue_resumed(self, text: str, max_steps: int, from_step: int) -> Job:
        job, config = self._require_resumable(text, max_steps)
        resumed_job = self._store.queue_again(
            job.id,
            Attempt(job.attempt + 1, from_step=from_step or None),
            Change(JobState.QUEUED, reason="", phase=""),
            at_end=True,
            config=config,
        )
        failpoint("resume-stored")
        self._wake()
        return resumed_job

    def _parse_submission(self, config_json: str, config_text: str, idempotency_key: str) -> AnyJob:
        for field, text in (("config_json", config_json), ("config_text", config_text)):
            if len(text) > _TEXT_CHARS:
                raise InvalidInput(f"longer than {_TEXT_CHARS} characters", field=field)
        config = parse_config(config_json)
        if len(idempotency_key) > _KEY_CHARS:
            raise InvalidInput(f"longer than {_KEY_CHARS} characters", field="idempotency_key")
        return config

    async def _check_jobs(self, configs: Sequence[AnyJob], owner: str) -> list[DistillError | None]:
        """Check jobs. Return for each job the error because of which it must wait, or None.

        The error says why the job's teacher cannot be used yet. A job with None can start.
        """
        if len(configs) > MAX_SUBMITTED_JOBS:
            raise InvalidInput(
                f"{len(configs)} jobs in one call; the limit is {MAX_SUBMITTED_JOBS}",
                field="jobs",
                hint="divide the file into smaller files",
            )
        self._link_jobs(configs)
        return await asyncio.gather(
            *(self._check_job(config, configs, owner) for config in configs)
        )

    async def _check_job(
        self, config: AnyJob, configs: Sequence[AnyJob], owner: str
    ) -> DistillError | None:
        with _naming_job(config, configs):
            self._require_place(config, owner=owner)
            checked_config = with_known_models(config, configs, self._store.find)
            if checked_config is None:  # a store of another job is checked when the job starts
                return None
            try:
                await self._preflight(checked_config, self._runs)
            except Unavailable as error:
                if outputs_in(config):
                    return None  # the job checks it again after the other jobs
                if self._let_wait is None or not error.field.startswith("teacher"):
                    raise
                return error
        return None

    def _link_jobs(self, configs: Sequence[AnyJob]) -> list[tuple[str, LinkedJob]]:
        """Create an id for each job. In each job, replace the names of other jobs by their ids."""
        ids: list[str] = []
        for config in configs:
            ids.append(self._create_id(config.method.type, config.name, ids))
        linked_jobs = []
        for number, config in enumerate(configs):
            with _naming_job(config, configs):
                linked_jobs.append((ids[number], link_job(configs, ids, number, self._store.find)))
        return linked_jobs

    def _find_known_jobs(
        self, configs: Sequence[AnyJob], requests: Sequence[Submission]
    ) -> list[Job]:
        """Return the jobs that were submitted with these keys; empty if the keys are new."""
        keys = [key for _, _, key in requests]
        jobs = [
            self._store.find_submitted(*key_and_config)
            for key_and_config in zip(keys, configs, strict=True)
            if key_and_config[0]
        ]
        known_jobs = [job for job in jobs if job is not None]
        if known_jobs and len(known_jobs) < len(configs):
            raise InvalidInput(
                f"this key was already used to submit other jobs, such as {known_jobs[0].id}",
                field="idempotency_key",
                hint="use a new key for each file",
            )
        return known_jobs

    def _queue_jobs(
        self,
        configs: Sequence[AnyJob],
        requests: Sequence[Submission],
        owner: str = "",
        problems: Sequence[DistillError | None] = (),
    ) -> list[Job]:
        problems = problems or [None] * len(configs)
        for config in configs:
            self._require_place(config, len(configs), owner)
        new_jobs = [
            NewJob(
                *(job_id, new_job.config, config, key, new_job.dependencies, owner),
                waits_for=problem.field if problem else "",
            )
            for (job_id, new_job), config, (_, _, key), problem in zip(
                self._link_jobs(configs), configs, requests, problems, strict=True
            )
        ]
        try:
            # Create the directories first, because every acknowledged job must have a directory. A
            # directory gets the id of its job as its name after the job is stored. So a server that
            # is killed before that leaves no directory with the name of a job.
            for new_job, (_, text, _) in zip(new_jobs, requests, strict=True):
                # The text of a file with several jobs is sent with the first job only.
                self._create_run(new_job.id, new_job.config, text or requests[0][1])
            failpoint("run-made")
            jobs = self._store.add_all(new_jobs)
        except Exception:
            for new_job in new_jobs:
                shutil.rmtree(unnamed_run(self._runs, new_job.id), ignore_errors=True)
            raise
        jobs = [
            self._let_wait(job, problem) if problem and self._let_wait else job
            for job, problem in zip(jobs, problems, strict=True)
        ]
        failpoint("job-stored")
        for new_job in new_jobs:
            name_run(self._runs, new_job.id)
        self._wake()
        return jobs

    def _require_resumable(self, text: str, max_steps: int) -> tuple[Job, AnyJob | None]:
        """Return the job, and its new configuration; None if the configuration stays the same.

        Raises an error if the job cannot be resumed.
        """
        job = self._store.resolve(text)
        if job.state not in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED):
            raise WrongState(
                f"job {job.id} is {job.state}; only a job that ended can be resumed", field="job_id"
            )
        if job.state is JobState.SUCCEEDED and max_steps <= job.max_steps:
            raise WrongState(
                f"job {job.id} has succeeded with all of its {job.max_steps} steps",
                field="max_steps",
                hint=f"resume the job with max_steps above {job.max_steps}",
            )
        if reason := self._store.dependencies.explain_failure(job.id):
            raise WrongState(reason, field="job_id", hint="resume that job first")
        config = self._extend_config(job, max_steps) if max_steps else None
        self._require_place(config or parse_config(job.config_json), owner=job.owner)
        return job, config

    def _require_files(self, job: Job, from_step: int) -> None:
        """Raise NotFound if the run directory or the checkpoint is missing. Blocking."""
        run = RunDirectory(self._runs / job.id)
        require_files(job, run)
        if from_step:
            checkpoint_root(job, run, from_step)

    def _require_place(self, config: AnyJob, job_count: int = 1, owner: str = "") -> None:
        """Raise if the queue has too few places, or if `config` can never start.

        A job can never start if it needs more than the machine has or its owner's quota of GPUs.
        Raises Unavailable if the server is stopping.
        """
        if self._is_stopping:
            raise Unavailable(
                "the server is stopping and takes no jobs",
                hint="try again when the next server has started",
            )
        self._machine.require_room(config)
        self._require_quota(owner, self._machine.gpus_of_job(config))
        if (queue_length := self._store.queue_length()) + job_count > self._max_queued:
            raise Overloaded(
                f"the queue is full: {queue_length} jobs are queued",
                hint="wait, cancel queued jobs, or start the server with a larger --most-queued",
            )

    def _create_run(self, job_id: str, config: AnyJob, config_text: str) -> None:
        # Not durable: the database holds the job, and the scheduler writes missing files when the
        # job starts. Three more fsync calls would make a submit three times as long.
        with _disk_errors():
            run = RunDirectory.create(
                unnamed_run(self._runs, job_id),
                config,
                config_text,
                suffix=_guess_suffix(config_text),
                durable=False,
            )
            run.server_mark.touch()

    async def _request_stop(self, job: Job, *, now: bool) -> None:
        """Request a stop in control.json. If this file cannot be written, send SIGTERM."""
        run = RunDirectory(self._runs / job.id)
        try:
            request = partial(request_stop, run, now=now, cancelled_attempt=job.attempt)
            await self._files.call(request)
        except OSError as error:  # also Unavailable: the run directory does not answer
            log.warning("job %s: cannot write control.json, sending SIGTERM: %s", job.id, error)
            # The scheduler repeats the signal, so its failure is not an error of the request.
            with suppress(OSError):
                await self._files.call(partial(self._stop_trainer, run, job.attempt))

    def _extend_config(self, job: Job, max_steps: int) -> AnyJob:
        if max_steps <= job.step:
            raise InvalidInput(
                f"the job has already made {job.step} steps",
                field="max_steps",
                hint="use a larger number",
            )
        changes = {"max_steps": max_steps, "epochs": None}
        return parse_config(json.dumps({**json.loads(job.config_json), **changes}))

    def _create_id(self, kind: str, name: str, used_ids: Sequence[str]) -> str:
        return next(
            job_id
            for job_id in run_ids(kind, name)
            if not (
                job_id in used_ids or self._store.is_used(job_id) or (self._runs / job_id).exists()
            )
        )


@contextmanager
def _naming_job(config: AnyJob, configs: Sequence[AnyJob]) -> Iterator[None]:
    """If there are several jobs, add the job's name to the message of a DistillError."""
    try:
        yield
    except DistillError as error:
        if len(configs) > 1:
            error.message = f"job {config.name!r}: {error.message}"
        raise


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Convert an OSError of the block to Unavailable: a full disk is not a defect of the server."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the server cannot write the job: {error.strerror}",
            hint="check the free space on the server's disk",
        ) from error


def _guess_suffix(config_text: str) -> str:
    """Guess the suffix of the job file, .toml or .yaml: clients send its text without its name.

    Only the first line that is not blank and not a comment is read, because a parser may need
    minutes for a hostile text.
    """
    lines = (line.strip() for line in config_text.splitlines())
    first_line = next((line for line in lines if line and not line.startswith("#")), "")
    key, equals, _ = first_line.partition("=")
    return ".toml" if first_line.startswith("[") or (equals and ":" not in key) else ".yaml"
