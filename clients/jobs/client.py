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
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from clients.config.kinds import AnyJob
from clients.jobs.artifacts import Checkpoint, checkpoint_step
from clients.jobs.connection import ServerConnection
from clients.jobs.download import Download
from clients.jobs.job import TERMINAL, UNKNOWN, Job, JobEvent, JobState, StartedTeacher
from clients.jobs.messages import (
    config_json,
    event_of,
    require_filtered,
    send_known_keys,
    teacher_of,
    values_of,
)
from clients.jobs.record import points_of
from clients.jobs.upload import Report, Uploader
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import TimedOut
from protos.rpc.transport import MAX_PAGE_JOBS

_Job = TypeVar("_Job", bound=AnyJob)


class JobHandle(Job):
    """A job as reported by the server, with the methods of DistillClient for this job.

    Values do not change. `refresh` and `wait` return a handle with new values. Each method raises
    the errors of the DistillClient method with the same name.
    """

    client: DistillClient  # no field: the values of a job can be copied and printed without it

    def refresh(self) -> JobHandle:
        """Return the current state of the job; see `DistillClient.get`."""
        return self.client.get(self.id)

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
    """A connection to one distill server. Safe to share between threads.

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

        - `address`: HOST:PORT, or https://HOST:PORT for TLS (see protos/rpc/channel.py for tokens)
        - `timeout`: seconds for one unary call; streams have no timeout
        - `patience_seconds`: how long a stream waits for a server that cannot be reached
        """
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

    def close(self) -> None:
        """Close the connection and cancel open streams. The client cannot be used afterwards."""
        self._connection.channel.close()

    def submit(
        self, config: AnyJob, *, config_text: str = "", idempotency_key: str | None = None
    ) -> JobHandle:
        """Queue a job, and return it.

        `config_text`: the text of the job file, which the server stores in the run directory. A
        second submission with the same `idempotency_key` returns the first job.

        Raises the errors of the server's checks of the job, such as InvalidInput or WrongState.
        """
        key = idempotency_key or secrets.token_hex(16)
        job = send_known_keys(
            lambda omitted: self._connection.call(
                self._stub.SubmitJob, _submit_request(config, config_text, key, omitted)
            )
        )
        return _handle_of(self, job)

    def submit_all(
        self, configs: Sequence[AnyJob], *, config_text: str = "", idempotency_key: str = ""
    ) -> Sequence[JobHandle]:
        """Queue all of the jobs or none, and return the jobs in the same order.

        `after` and values such as `@NAME/store` may refer to earlier jobs of the list. Arguments
        and errors are those of `submit`.
        """
        # One key per call, so that a retry of the call cannot queue the jobs twice.
        key = idempotency_key or secrets.token_hex(16)
        # In the first request only: a hundred copies of the text can exceed the size of a message.
        texts = [config_text] + [""] * len(configs)

        def send(omitted: Collection[str]) -> pb.SubmitJobsResponse:
            jobs = [
                _submit_request(config, texts[n], f"{key}/{n}", omitted)
                for n, config in enumerate(configs)
            ]
            request = pb.SubmitJobsRequest(jobs=jobs)
            return self._connection.call(self._stub.SubmitJobs, request)

        return [_handle_of(self, job) for job in send_known_keys(send).jobs]

    def upload(self, configs: Sequence[_Job], report: Report = lambda progress: None) -> list[_Job]:
        """Upload the files that jobs name. Return the jobs with the paths of the files on the
        server.

        Hub ids and names that do not exist on this machine are unchanged. Files that the server
        already has are not sent again. Raises InvalidInput, naming the key, if a file cannot be
        sent, and WrongState if the files do not fit on the server's disk.
        """
        return [*map(Uploader(self._connection, self._stub, report).upload, configs)]

    def check(self, *configs: AnyJob) -> None:
        """Raise the error that `submit` or `submit_all` would raise. Queues nothing."""

        def send(omitted: Collection[str]) -> None:
            if len(configs) == 1:
                check_request = pb.CheckJobRequest(config_json=config_json(configs[0], omitted))
                self._connection.call(self._stub.CheckJob, check_request, retry=False)
                return
            jobs = [_submit_request(config, "", "", omitted) for config in configs]
            request = pb.SubmitJobsRequest(jobs=jobs, check_only=True)
            self._connection.call(self._stub.SubmitJobs, request, retry=False)

        send_known_keys(send)

    def get(self, job_id: str) -> JobHandle:
        """Return a job, including `config_json` and `checkpoints`."""
        return _handle_of(
            self, self._connection.call(self._stub.GetJob, pb.GetJobRequest(job_id=job_id))
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
    ) -> list[JobHandle]:
        """Return up to `limit` jobs, newest first.

        `state`: only jobs in this state, or in one of these states. `older_than_seconds`: only jobs
        that ended or, if they have not ended, were submitted at least so long ago by the server's
        clock; raises WrongState if the server is too old for this.
        `owner`: only jobs of this owner. `mine`: only jobs of the owner of this client's token;
        raises InvalidInput if the token has no owner. `labels`: only jobs with all of these labels.
        For the next page, pass the id of the last job as `before_id`.
        """
        states = [state] if isinstance(state, JobState) else [*(state or ())]
        state_numbers = [pb.JobState.Value(state) for state in states]
        jobs: list[JobHandle] = []
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
        request = pb.CancelJobRequest(job_id=job_id, now=now)
        return _handle_of(self, self._connection.call(self._stub.CancelJob, request))

    def resume(
        self, job_id: str, *, max_steps: int | None = None, from_step: int | None = None
    ) -> JobHandle:
        """Queue a new attempt of a job that has ended.

        The attempt starts from the checkpoint of `from_step`, or from the newest checkpoint.
        `max_steps` replaces the job's number of steps. Raises WrongState if the job has not ended.
        """
        request = pb.ResumeJobRequest(
            job_id=job_id, max_steps=max_steps or 0, from_step=from_step or 0
        )
        # Do not retry: if only the reply was lost, the job has already resumed, and a second call
        # would fail.
        return _handle_of(self, self._connection.call(self._stub.ResumeJob, request, retry=False))

    def remove(self, job_id: str) -> JobHandle:
        """Remove a finished job with its files on the server, and return its last state.

        Raises WrongState if the job has not ended, is pinned, or needed by an unfinished job.
        """
        # Do not retry: if only the reply was lost, a second call would not find the job.
        request = pb.RemoveJobRequest(job_id=job_id)
        return _handle_of(self, self._connection.call(self._stub.RemoveJob, request, retry=False))

    def pin(self, job_id: str, *, pinned: bool = True) -> JobHandle:
        """Protect a job from removal; with `pinned=False`, end the protection."""
        request = pb.PinJobRequest(job_id=job_id, pinned=pinned)
        return _handle_of(self, self._connection.call(self._stub.PinJob, request))

    def teachers(self) -> Sequence[StartedTeacher]:
        """Return the teachers that the server runs."""
        request = pb.ListTeachersRequest()
        return [*map(teacher_of, self._connection.call(self._stub.ListTeachers, request).teachers)]

    def watch(
        self, job_id: str, after_seq: int = 0, *, timeout: float | None = None
    ) -> Iterator[JobEvent]:
        """Yield every event after `after_seq` until the job ends, each once.

        The stream continues across restarts of the server.

        Raises Unavailable if the server cannot be reached for `patience_seconds`, and TimedOut
        after `timeout` seconds. Neither affects the job.
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
        """Wait until a job ends, and return it.

        Raises TimedOut after `timeout` seconds, which does not affect the job. A failed job is
        returned like any other job.
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

        The log starts at its first byte, or `tail_lines` lines before its end. With `follow`, new
        bytes are yielded until the attempt ends. Reconnects like `watch`.
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

        `checkpoint` is a step, "best" (see `clients.runs.best_step`) or "last". The export of a
        capture is its store; the export of an evaluation is its results.
        `clients.jobs.artifacts.pull_run` copies from a run directory.

        `destination` is created only when the download is complete. After a loss of the connection,
        the download goes on, as `watch` does. Raises WrongState if the job
        has no export (with the reason if it failed), InvalidInput if `destination` is not empty,
        and Corrupt if bytes are missing or do not match their checksum.
        """
        if isinstance(checkpoint, str):
            job = self.get(job_id)
            job_id = job.id
            checkpoint = checkpoint_step(job, checkpoint, lambda: points_of(self.history(job_id)))
        request = pb.GetArtifactRequest(job_id=job_id, checkpoint_step=checkpoint or 0)
        return self._download(request, Path(destination))

    def pull_notes(self, job_id: str, destination: Path | str) -> Path:
        """Download environment.json and samples/ of a job in any state into a new directory.

        Raises NotFound if neither exists yet, and the errors of `pull`.
        """
        return self._download(pb.GetArtifactRequest(job_id=job_id, notes=True), Path(destination))

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
