"""The Python client of a distill server.

Example:

    with DistillClient("localhost:50051") as client:
        job = client.submit(config)
        for event in job.watch():
            print(event.step, event.metrics)
        job.pull("student/")
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from clients.config.file import JobFile, JobSource, load_job, load_jobs, localized
from clients.config.kinds import AnyJob
from clients.config.tables.common import Table
from clients.jobs.artifacts import Checkpoint, checkpoint_step
from clients.jobs.connection import ServerConnection
from clients.jobs.display.job_display import JobDisplay, JobList
from clients.jobs.download import Download
from clients.jobs.job import TERMINAL, UNKNOWN, JobEvent, JobState, StartedTeacher
from clients.jobs.messages import (
    config_json,
    event_of,
    require_filtered,
    send_known_keys,
    teacher_of,
    values_of,
)
from clients.jobs.record import JobRecord, Notes, notes_in, points_of
from clients.jobs.upload import Report, Uploader
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import InvalidInput, NotFound, TimedOut
from protos.rpc.channel import is_forked
from protos.rpc.transport import MAX_PAGE_JOBS

_Job = TypeVar("_Job", bound=AnyJob)


class JobHandle(JobDisplay):
    """A job as the server described it, with the methods of DistillClient for this job.

    The fields of a handle do not change while the job runs. `refresh` and `wait` return a new
    handle with new values. Each method raises the errors of the DistillClient method with the same
    name.
    """

    client: DistillClient  # no field: the values of a job can be copied and printed without it

    def refresh(self) -> JobHandle:
        """Return the current state of the job; see `DistillClient.get`."""
        return self.client.get(self.id)

    def record(self, *, with_notes: bool = False) -> JobRecord:
        """Ask the server for the job and its metrics as they are now, and return them.

        `with_notes`: also the samples, the preview and the environment of the job.
        """
        job = self.refresh()
        points = points_of(job.history()) if job.metrics else []
        return JobRecord(job, points, self._read_notes() if with_notes else Notes())

    def _read_notes(self) -> Notes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return notes_in(self.client.pull_notes(self.id, Path(folder) / "notes"))
            except NotFound:  # a job that has not begun, or ended early, has none
                return Notes()

    def wait(self, timeout: float | None = None) -> JobHandle:
        """Wait until the job ends, and return it; see `DistillClient.wait`."""
        return self.client.wait(self.id, timeout)

    def watch(self, after_seq: int = 0, *, timeout: float | None = None) -> Iterator[JobEvent]:
        """Yield every event until the job ends; see `DistillClient.watch`."""
        return self.client.watch(self.id, after_seq, timeout=timeout)

    def history(self) -> Sequence[JobEvent]:
        """Return every event up to now; see `DistillClient.history`."""
        return self.client.history(self.id)

    def logs(
        self, *, attempt: int = 0, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[bytes]:
        """Yield the log of an attempt in chunks; see `DistillClient.logs`."""
        return self.client.logs(self.id, attempt=attempt, follow=follow, tail_lines=tail_lines)

    def cancel(self, *, now: bool = False) -> JobHandle:
        """Cancel the job without waiting for its end; see `DistillClient.cancel`."""
        return self.client.cancel(self.id, now=now)

    def resume(self, *, max_steps: int | None = None, from_step: int | None = None) -> JobHandle:
        """Queue a new attempt of a finished job; see `DistillClient.resume`."""
        return self.client.resume(self.id, max_steps=max_steps, from_step=from_step)

    def pull(self, destination: Path | str, *, checkpoint: Checkpoint | None = None) -> Path:
        """Download the export or a checkpoint into a new directory; see `DistillClient.pull`."""
        return self.client.pull(self.id, destination, checkpoint=checkpoint)


class DistillClient:
    """A connection to one distill server. Several threads can share a client.

    A copy of a client, such as the copy in a process that multiprocessing starts with "spawn",
    opens its own connection, with the token in the environment of its process. In a process that
    was forked after the connection opened, each call raises WrongState.

    Methods raise only exceptions of protos.errors, and Unavailable if the server cannot be reached.
    A `job_id` is an id, an unambiguous prefix of an id, or "@last" for the newest job. An unknown
    id raises NotFound.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout: float = 10.0,
        patience_seconds: float = 60.0,
    ) -> None:
        """Prepare a channel. The connection opens on the first call.

        - `address`: HOST:PORT, or https://HOST:PORT for TLS
        - `timeout`: time limit of a unary call, in seconds; streams have no limit
        - `patience_seconds`: how long a stream waits for a server that cannot be reached

        The token comes from environment variables, which protos/rpc/channel.py lists.
        """
        # A copy in another process opens a connection of its own, with the token of that process.
        self._copy = partial(
            DistillClient, address, timeout=timeout, patience_seconds=patience_seconds
        )
        self._connection = ServerConnection(
            address, timeout=timeout, patience_seconds=patience_seconds
        )
        self._stub = DistillStub(self._connection.channel)

    def __enter__(self) -> DistillClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._copy, ()

    def close(self) -> None:
        """Close the connection and cancel open streams.

        Later calls of the client and of its handles raise WrongState.
        """
        if not is_forked():  # the connection is the parent's
            self._connection.close()

    def submit(
        self,
        job: JobSource,
        *,
        upload: bool = False,
        report: Report = lambda progress: None,
        idempotency_key: str | None = None,
    ) -> JobHandle:
        """Queue a job, and return it.

        - `job`: a job such as OnPolicyJob, the result of `load_job`, or a dict with the tables of a
          job file. Paths of files on this machine become absolute. The text of a job file is stored
          in the run directory.
        - `upload`: send the files on this machine to the server, as the method `upload` does
        - `report`: a function that is called with the progress of the upload
        - `idempotency_key`: a second submission with the same key queues nothing, and returns the
          first job

        Raises InvalidInput with all problems of the job, and the errors that the server's own
        checks of the job find, such as InvalidInput or WrongState.
        """
        [file] = self._prepare([load_job(job)], upload, report)
        key = idempotency_key or secrets.token_hex(16)
        queued_job = send_known_keys(
            lambda omitted: self._connection.call(
                self._stub.SubmitJob, _submit_request(file.config, file.text, key, omitted)
            )
        )
        return _handle_of(self, queued_job)

    def submit_all(
        self,
        jobs: Sequence[JobSource],
        *,
        upload: bool = False,
        report: Report = lambda progress: None,
        idempotency_key: str = "",
    ) -> JobList[JobHandle]:
        """Queue all of the jobs, or none if one is refused. Return the jobs in the same order.

        `after` and values such as `@NAME/store` may refer to earlier jobs of the list. A dict with
        a table `sweep` gives several jobs. The other arguments and the errors are those of
        `submit`.
        """
        if isinstance(jobs, Mapping | Table | str) or not isinstance(jobs, Iterable):
            raise InvalidInput("submit_all takes several jobs", hint="give a list of jobs")
        files = [file for job in jobs for file in load_jobs(job)]
        if len(files) == 1:  # older servers have no SubmitJobs
            submission_key = idempotency_key or None
            return JobList(
                [
                    self.submit(
                        files[0], upload=upload, report=report, idempotency_key=submission_key
                    )
                ]
            )
        files = self._prepare(files, upload, report)
        # One key per call, so that a retry of the call cannot queue the jobs twice.
        key = idempotency_key or secrets.token_hex(16)

        def send(omitted: Collection[str]) -> pb.SubmitJobsResponse:
            requests = []
            earlier_texts = {""}
            for n, file in enumerate(files):
                # Once for all jobs of a file: a hundred copies can exceed the size of a message.
                text = "" if file.text in earlier_texts else file.text
                earlier_texts.add(text)
                requests.append(_submit_request(file.config, text, f"{key}/{n}", omitted))
            request = pb.SubmitJobsRequest(jobs=requests)
            return self._connection.call(self._stub.SubmitJobs, request)

        return JobList(_handle_of(self, job) for job in send_known_keys(send).jobs)

    def _prepare(self, files: Sequence[JobFile], upload: bool, report: Report) -> list[JobFile]:
        """Return the jobs with paths that the server can open.

        These are the paths of the uploaded files, or absolute paths.
        """
        configs = [file.config for file in files]
        configs = self.upload(configs, report) if upload else [*map(localized, configs)]
        return [replace(file, config=config) for file, config in zip(files, configs, strict=True)]

    def upload(self, configs: Sequence[_Job], report: Report = lambda progress: None) -> list[_Job]:
        """Check and upload the files that jobs name. Return the jobs with the server's paths of the
        files.

        Hub ids, and names that do not exist on this machine, are unchanged. Files that the server
        already has are not sent again. `report`: a function that is called with the progress.
        Raises InvalidInput, naming the key, if a file is not valid or cannot be sent, and
        WrongState if the files do not fit on the server's disk.
        """
        from clients.preflight.data_files import check_data
        from clients.preflight.files import check_models

        for config in configs:
            check_data(config, only_existing=True)
            check_models(config, here=False)
        return [*map(Uploader(self._connection, self._stub, report).upload, configs)]

    def check(self, *jobs: JobSource) -> None:
        """Raise the error that a submission of these jobs would raise. Queue nothing."""
        configs = [localized(file.config) for job in jobs for file in load_jobs(job)]

        def send(omitted: Collection[str]) -> None:
            if len(configs) == 1:
                check_request = pb.CheckJobRequest(config_json=config_json(configs[0], omitted))
                self._connection.call(self._stub.CheckJob, check_request, retry=False)
                return
            requests = [_submit_request(config, "", "", omitted) for config in configs]
            request = pb.SubmitJobsRequest(jobs=requests, check_only=True)
            self._connection.call(self._stub.SubmitJobs, request, retry=False)

        send_known_keys(send)

    def get(self, job_id: str) -> JobHandle:
        """Return a job. Its `config_json` and `checkpoints` are set, too."""
        return _handle_of(
            self,
            self._connection.call(self._stub.GetJob, pb.GetJobRequest(job_id=_checked_id(job_id))),
        )

    def list(
        self,
        *,
        state: JobState | Collection[JobState] | None = None,
        limit: int = 50,
        before_id: str = "",
        owner: str = "",
        mine: bool = False,
        labels: Mapping[str, str] | None = None,
        older_than_seconds: float = 0.0,
    ) -> JobList[JobHandle]:
        """Return up to `limit` jobs, newest first.

        Each of these filters keeps only some jobs:

        - `state`: jobs in this state, or in one of these states
        - `older_than_seconds`: jobs that ended at least so long ago, by the clock of the server.
          For a job that has not ended, the time of its submission is compared.
        - `owner`: jobs of this owner
        - `mine`: jobs of the owner of this client's token
        - `labels`: jobs that have all of these labels

        For the next page, pass the id of the last job as `before_id`. Raises InvalidInput for
        `mine` if the token has no owner, and WrongState if the server is too old for a filter.
        """
        states = [state] if isinstance(state, str) else [*(state or ())]
        for name in states:
            if name not in JobState.__members__:
                raise InvalidInput(
                    f"there is no state {str(name)!r}",
                    field="state",
                    hint=f"the states are {', '.join(JobState)}",
                )
        if labels is not None and not isinstance(labels, Mapping):
            raise InvalidInput(
                f"must be a dict of labels and values (got {labels!r})",
                field="labels",
                hint='write it as {"project": "math"}',
            )
        state_numbers = [pb.JobState.Value(state) for state in states]
        jobs = JobList[JobHandle]()
        while len(jobs) < limit:
            page_size = min(limit - len(jobs), MAX_PAGE_JOBS)
            request = pb.ListJobsRequest(
                # Older servers have the first of these fields only.
                state=state_numbers[0] if len(states) == 1 else pb.JOB_STATE_UNSPECIFIED,
                states=state_numbers,
                limit=page_size,
                before_id=before_id,
                owner=owner,
                mine=mine,
                labels=labels,
                older_than_seconds=older_than_seconds,
            )
            response = self._connection.call(self._stub.ListJobs, request)
            page = response.jobs
            require_filtered(response, owner, mine, labels or {}, older_than_seconds)
            handles = [_handle_of(self, job) for job in page]
            jobs += [handle for handle in handles if not states or handle.state in states]
            if len(page) < page_size:
                break
            before_id = page[-1].id
        return jobs

    def cancel(self, job_id: str, *, now: bool = False) -> JobHandle:
        """Cancel a job: it stops after a last checkpoint, or immediately if `now` is true.

        Returns without waiting. Use `wait` to wait for the end. Repeated calls have no further
        effect.
        """
        request = pb.CancelJobRequest(job_id=_checked_id(job_id), now=now)
        return _handle_of(self, self._connection.call(self._stub.CancelJob, request))

    def resume(
        self, job_id: str, *, max_steps: int | None = None, from_step: int | None = None
    ) -> JobHandle:
        """Queue a new attempt of a job that has ended.

        The attempt starts from the checkpoint of `from_step`, or from the newest checkpoint.
        `max_steps` replaces the job's number of steps. Raises WrongState if the job has not ended.
        """
        request = pb.ResumeJobRequest(
            job_id=_checked_id(job_id), max_steps=max_steps or 0, from_step=from_step or 0
        )
        # Do not retry: if only the reply was lost, the job has already resumed, and a second call
        # would fail.
        return _handle_of(self, self._connection.call(self._stub.ResumeJob, request, retry=False))

    def remove(self, job_id: str) -> JobHandle:
        """Remove a finished job with its files on the server, and return its last state.

        Raises WrongState if the job has not ended, if it is pinned, or if an unfinished job needs
        it.
        """
        # Do not retry: if only the reply was lost, a second call would not find the job.
        request = pb.RemoveJobRequest(job_id=_checked_id(job_id))
        return _handle_of(self, self._connection.call(self._stub.RemoveJob, request, retry=False))

    def pin(self, job_id: str, *, pinned: bool = True) -> JobHandle:
        """Protect a job from removal. With `pinned=False`, end the protection."""
        request = pb.PinJobRequest(job_id=_checked_id(job_id), pinned=pinned)
        return _handle_of(self, self._connection.call(self._stub.PinJob, request))

    def teachers(self) -> Sequence[StartedTeacher]:
        """Return the teachers that the server has started for its jobs."""
        request = pb.ListTeachersRequest()
        return [*map(teacher_of, self._connection.call(self._stub.ListTeachers, request).teachers)]

    def watch(
        self, job_id: str, after_seq: int = 0, *, timeout: float | None = None
    ) -> Iterator[JobEvent]:
        """Yield every event with a number above `after_seq`, each once, until the job ends.

        The stream continues across restarts of the server. Raises Unavailable if the server cannot
        be reached for `patience_seconds`, and TimedOut after `timeout` seconds. The job continues
        after either error.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # A prefix or "@last" could name another job when the stream is reopened.
        job_id = self.get(job_id).id
        try:
            yield from self._iterate_events(job_id, after_seq, deadline)
        except TimedOut as error:
            hint = "the job continues; watch or cancel the job"
            raise TimedOut(f"job {job_id} did not end within {timeout:g} s", hint=hint) from error

    def history(self, job_id: str) -> Sequence[JobEvent]:
        """Return every event up to now, without waiting for new events."""
        job = self.get(job_id)
        events: list[JobEvent] = []
        with closing(self._iterate_events(job.id, 0, deadline=None)) as stream:
            for event in stream:
                events.append(event)
                if event.seq >= job.last_seq:
                    break
        return events

    def wait(self, job_id: str, timeout: float | None = None) -> JobHandle:
        """Wait until a job ends, and return it. A failed job is returned, too, and raises no error.

        Raises TimedOut after `timeout` seconds. The job then continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job = self.get(job_id)
        while job.state not in TERMINAL:
            last_seq = job.last_seq
            try:
                for _ in self._iterate_events(job.id, job.last_seq, deadline):
                    pass
            except TimedOut as error:
                raise TimedOut(f"job {job.id} did not end within {timeout:g} s") from error
            job = self.get(job.id)
            if job.state is UNKNOWN and job.last_seq == last_seq:
                return job  # the end of the stream says that the job has ended
        return job

    def logs(
        self, job_id: str, *, attempt: int = 0, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[bytes]:
        """Yield the log of an attempt (0: the newest) in chunks, each byte once.

        The first chunk starts at the beginning of the log, or, if `tail_lines` is not 0, that many
        lines before its end. With `follow`, the stream continues with new bytes until the attempt
        ends. After a loss of the connection, the stream continues as in `watch`.
        """
        job = self.get(job_id)
        request = pb.StreamLogsRequest(
            job_id=job.id, attempt=attempt or job.attempt, follow=follow, tail_lines=tail_lines
        )
        for chunk in self._connection.lasting(lambda: self._stub.StreamLogs(request)):
            request.after_offset, request.tail_lines = chunk.next_offset, 0
            yield chunk.data

    def pull(
        self, job_id: str, destination: Path | str, *, checkpoint: Checkpoint | None = None
    ) -> Path:
        """Download the export or a checkpoint of a job into a new directory, and return its path.

        `checkpoint` is a step, "best" (see `clients.runs.best_step`), "last", or None for the
        export. The export of a capture is its store; the export of an evaluation is its results.
        `clients.jobs.artifacts.pull_run` does the same for a run directory on this machine.

        `destination` exists only after the download is complete. After a loss of the connection,
        the download continues as in `watch`.

        Raises WrongState if the job has no export (for a failed job, with the reason of the
        failure), InvalidInput if `destination` is not empty, and Corrupt if bytes are missing or do
        not match their checksum.
        """
        if isinstance(checkpoint, str):
            job = self.get(job_id)
            job_id = job.id
            checkpoint = checkpoint_step(job, checkpoint, lambda: points_of(self.history(job_id)))
        request = pb.GetArtifactRequest(job_id=_checked_id(job_id), checkpoint_step=checkpoint or 0)
        return self._download(request, Path(destination))

    def pull_notes(self, job_id: str, destination: Path | str) -> Path:
        """Download environment.json and samples/ of a job in any state into a new directory.

        Raises NotFound if the job has neither of them yet, and the errors of `pull`.
        """
        return self._download(
            pb.GetArtifactRequest(job_id=_checked_id(job_id), notes=True), Path(destination)
        )

    def _download(self, request: pb.GetArtifactRequest, destination: Path) -> Path:
        with Download(destination) as download:
            begins = False

            def open_stream() -> Iterator[pb.ArtifactChunk]:
                nonlocal begins
                begins = True
                request.path, request.offset = download.position
                return self._stub.GetArtifact(request)

            for chunk in self._connection.lasting(open_stream):
                if begins and (chunk.path, chunk.offset) != (request.path, request.offset):
                    download.restart()  # an older server starts with the first file
                begins = False
                download.add(chunk)
            return download.finish()

    def _iterate_events(
        self, job_id: str, after_seq: int, deadline: float | None
    ) -> Generator[JobEvent, None, None]:
        request = pb.WatchJobRequest(job_id=job_id, after_seq=after_seq)

        def open_stream() -> Iterator[pb.JobEvent]:
            seconds = None if deadline is None else max(0.001, deadline - time.monotonic())
            return self._stub.WatchJob(request, timeout=seconds)

        for event in self._connection.lasting(open_stream, deadline):
            request.after_seq = event.seq
            yield event_of(event)


def _checked_id(job_id: str) -> str:
    """Return `job_id` if it is a string.

    Raises InvalidInput for another value, such as a handle.
    """
    if not isinstance(job_id, str):
        hint = "give job.id" if isinstance(job_id, JobHandle) else "give the id as a string"
        raise InvalidInput(
            f"must be the id of a job (got a value of the class {type(job_id).__name__})",
            field="job_id",
            hint=hint,
        )
    return job_id


def _submit_request(
    config: AnyJob, text: str, key: str, omitted_keys: Collection[str]
) -> pb.SubmitJobRequest:
    document = config_json(config, omitted_keys)
    return pb.SubmitJobRequest(config_json=document, config_text=text, idempotency_key=key)


def _handle_of(client: DistillClient, job: pb.Job) -> JobHandle:
    """Return the handle of a job sent by the server of `client`."""
    handle = JobHandle(**values_of(job))
    object.__setattr__(handle, "client", client)  # the values are frozen
    return handle
