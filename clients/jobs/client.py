"""The Python client of a distill server.

Example:

    with DistillClient("localhost:50051") as client:
        job = client.submit(config)
        for event in job.watch():
            print(event.step, event.metrics)
        job.pull("student/")
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from clients.config.kinds import AnyJob
from clients.jobs.artifacts import Checkpoint, checkpoint_step
from clients.jobs.download import Download
from clients.jobs.handle import JobHandle, handle_of
from clients.jobs.job import TERMINAL, JobEvent, JobState
from clients.jobs.record import points_of
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import DistillError, TimedOut, Unavailable
from protos.rpc.channel import SERVER_TOKEN, open_channel
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_PAGE_JOBS, STREAM_OPEN

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

# A restarting server is back within this time. A unary call waits this long before its retry; a
# stream waits `patience_seconds`.
_RESTART_SECONDS = 1.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class DistillClient:
    """A connection to one distill server. Safe to share between threads.

    Methods raise exceptions of protos.errors only; Unavailable if the server cannot be reached.
    Wherever a method takes a `job_id`, it may be an id, an unambiguous prefix of an id, or "@last"
    for the newest job. An unknown id raises NotFound.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout: float = 10.0,
        patience_seconds: float = 60.0,
    ) -> None:
        """Prepare a channel; it connects on the first call.

        address: HOST:PORT, or https://HOST:PORT for TLS (see protos/rpc/channel.py for tokens)
        timeout: seconds for one unary call; streams have no timeout
        patience_seconds: how long a stream waits for a server that cannot be reached
        """
        self._server = f"distill server {address}"
        self._timeout = timeout
        self._patience = patience_seconds
        self._channel = open_channel(address, token=SERVER_TOKEN)
        self._stub = DistillStub(self._channel)

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
        self._channel.close()

    def submit(
        self, config: AnyJob, *, config_text: str = "", idempotency_key: str | None = None
    ) -> JobHandle:
        """Queue a job, and return it.

        `config_text` is the text of the job file; the server keeps it in the run directory. A
        second submission with the same `idempotency_key` returns the first job.

        Raises the errors of the server's checks of the job, such as InvalidInput or WrongState.
        """
        request = pb.SubmitJobRequest(
            config_json=config.model_dump_json(),
            config_text=config_text,
            # Made once per call, so that a retry of the call cannot queue a second job.
            idempotency_key=idempotency_key or secrets.token_hex(16),
        )
        return handle_of(self, self._call(self._stub.SubmitJob, request))

    def check(self, config: AnyJob) -> None:
        """Raise the error that `submit` would raise for this job now. Queues nothing."""
        request = pb.CheckJobRequest(config_json=config.model_dump_json())
        self._call(self._stub.CheckJob, request, again=False)

    def get(self, job_id: str) -> JobHandle:
        """Return a job, including `config_json` and `checkpoints`."""
        return handle_of(self, self._call(self._stub.GetJob, pb.GetJobRequest(job_id=job_id)))

    def list(
        self, *, state: JobState | None = None, limit: int = 50, before_id: str = ""
    ) -> list[JobHandle]:
        """Return up to `limit` jobs, newest first, optionally only those in `state`.

        For the next page, pass the id of the last job as `before_id`.
        """
        number = pb.JobState.Value(state) if state else pb.JOB_STATE_UNSPECIFIED
        jobs: list[JobHandle] = []
        while len(jobs) < limit:
            asked = min(limit - len(jobs), MAX_PAGE_JOBS)
            request = pb.ListJobsRequest(state=number, limit=asked, before_id=before_id)
            page = self._call(self._stub.ListJobs, request).jobs
            jobs += [handle_of(self, job) for job in page]
            if len(page) < asked:
                break
            before_id = page[-1].id
        return jobs

    def cancel(self, job_id: str, *, now: bool = False) -> JobHandle:
        """Cancel a job: it stops after a last checkpoint, or at once if `now` is true.

        Returns without waiting; call `wait` to wait for the end. Cancelling again is harmless.
        """
        request = pb.CancelJobRequest(job_id=job_id, now=now)
        return handle_of(self, self._call(self._stub.CancelJob, request))

    def resume(
        self, job_id: str, *, max_steps: int | None = None, from_step: int | None = None
    ) -> JobHandle:
        """Queue a new attempt of a job that has ended.

        The attempt starts from the checkpoint of `from_step`, or from the newest one. `max_steps`
        replaces the job's number of steps. Raises WrongState if the job has not ended.
        """
        request = pb.ResumeJobRequest(
            job_id=job_id, max_steps=max_steps or 0, from_step=from_step or 0
        )
        # Not retried: if only the reply was lost, the job has already resumed, and a second call
        # would fail.
        return handle_of(self, self._call(self._stub.ResumeJob, request, again=False))

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
            yield from self._events(job_id, after_seq, deadline)
        except TimedOut as error:
            hint = "the job continues; watch it again, or cancel it"
            raise TimedOut(f"job {job_id} did not end within {timeout:g} s", hint=hint) from error

    def history(self, job_id: str) -> Sequence[JobEvent]:
        """Return every event up to now, without waiting for new ones."""
        job = self.get(job_id)
        events: list[JobEvent] = []
        with closing(self._events(job.id, 0, deadline=None)) as stream:
            while len(events) < job.last_seq and (event := next(stream, None)) is not None:
                events.append(event)
        return events

    def wait(self, job_id: str, timeout: float | None = None) -> JobHandle:
        """Wait until a job ends, and return it.

        Raises TimedOut after `timeout` seconds, which does not affect the job. A job that failed is
        returned, not raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        job = self.get(job_id)
        while job.state not in TERMINAL:
            try:
                for _ in self._events(job.id, job.last_seq, deadline):
                    pass
            except TimedOut as error:
                raise TimedOut(f"job {job.id} did not end within {timeout:g} s") from error
            job = self.get(job.id)
        return job

    def logs(
        self, job_id: str, *, attempt: int = 0, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[bytes]:
        """Yield the log of an attempt (0: the newest) in chunks, no byte twice.

        The log starts at its first byte, or `tail_lines` lines before its end. With `follow`, new
        bytes are yielded until the attempt ends. Reconnects like `watch`.
        """
        job = self.get(job_id)
        request = pb.StreamLogsRequest(
            job_id=job.id, attempt=attempt or job.attempt, follow=follow, tail_lines=tail_lines
        )
        for chunk in self._lasting(lambda: self._stub.StreamLogs(request)):
            request.after_offset, request.tail_lines = chunk.next_offset, 0
            yield chunk.data

    def pull(
        self, job_id: str, destination: Path | str, *, checkpoint: Checkpoint | None = None
    ) -> Path:
        """Download the export or a checkpoint of a job into a new directory, and return its path.

        `checkpoint` is a step, "best" (see `clients.runs.best_step`) or "last". For a capture the
        export is its store. `clients.jobs.artifacts.pull_run` copies from a run directory.

        `destination` appears only when the download is complete. Raises WrongState if the job has
        no export (with the reason if it failed), InvalidInput if `destination` is not empty, and
        Corrupt if bytes are missing or do not match their checksum.
        """
        if isinstance(checkpoint, str):
            job = self.get(job_id)
            job_id = job.id
            checkpoint = checkpoint_step(job, checkpoint, lambda: points_of(self.history(job_id)))
        request = pb.GetArtifactRequest(job_id=job_id, checkpoint_step=checkpoint or 0)
        return self._pull(request, Path(destination))

    def pull_notes(self, job_id: str, destination: Path | str) -> Path:
        """Download environment.json and samples/ of a job in any state into a new directory.

        Raises NotFound if the job has neither yet, and the errors of `pull`.
        """
        return self._pull(pb.GetArtifactRequest(job_id=job_id, notes=True), Path(destination))

    def _pull(self, request: pb.GetArtifactRequest, destination: Path) -> Path:
        with Download(destination) as download:
            call = self._stub.GetArtifact(request)
            try:
                for chunk in call:
                    download.add(chunk)
            except grpc.RpcError as error:
                raise fault_of(error, self._server) from error
            finally:
                call.cancel()
            return download.finish()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        *,
        again: bool = True,
    ) -> _Answer:
        """Make a unary call within the timeout, and retry once if the server cannot be reached.

        `again` allows the retry. An Unavailable error with a field is not retried: the server sent
        it, because it could not reach a job's teacher.
        """
        deadline = time.monotonic() + self._timeout
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            fault = fault_of(error, self._server)
            if not again or not isinstance(fault, Unavailable) or fault.field:
                raise fault from error
        patience = max(0.001, min(_RESTART_SECONDS, deadline - time.monotonic()))
        try:
            return method(request, timeout=patience, wait_for_ready=True)
        except grpc.RpcError as error:
            second = fault_of(error, self._server)
            raise fault if isinstance(second, TimedOut) else second from error

    def _events(
        self, job_id: str, after_seq: int, deadline: float | None
    ) -> Generator[JobEvent, None, None]:
        request = pb.WatchJobRequest(job_id=job_id, after_seq=after_seq)

        def open_stream() -> Iterator[pb.JobEvent]:
            left = None if deadline is None else max(0.001, deadline - time.monotonic())
            return self._stub.WatchJob(request, timeout=left)

        for event in self._lasting(open_stream, deadline):
            request.after_seq = event.seq
            yield _event_of(event)

    def _lasting(
        self, open_stream: Callable[[], Iterator[_Answer]], deadline: float | None = None
    ) -> Iterator[_Answer]:
        """Yield the messages of a stream, and reopen the stream whenever the server goes away.

        `open_stream` must open it behind the last message received.
        """
        away_since: float | None = None
        pauses = _pauses()
        while True:
            # Any: grpc's types do not say that a response iterator is also a grpc.Call.
            call: Any = open_stream()
            try:
                if STREAM_OPEN in call.initial_metadata():
                    away_since, pauses = None, _pauses()
                yield from call
                return
            except grpc.RpcError as error:
                away_since = away_since or time.monotonic()
                fault = self._fault_of_stream(error)
                out_of_patience = time.monotonic() - away_since > self._patience
                if out_of_patience or not isinstance(fault, Unavailable):
                    raise fault from error
            finally:
                call.cancel()
            time.sleep(next(pauses))
            self._wait_for_server(min(deadline or inf, away_since + self._patience))

    def _wait_for_server(self, until: float) -> None:
        """Wait for a connection, for a few seconds at most.

        The wait is short because a server that keeps crashing may be up only for moments.
        """
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(min(_LONGEST_PAUSE_SECONDS, max(0.0, until - time.monotonic())))
        except grpc.FutureTimeoutError:
            ready.cancel()

    def _fault_of_stream(self, error: grpc.RpcError) -> DistillError:
        call: Any = error
        if call.code() is grpc.StatusCode.CANCELLED:
            # The server cancelled the call: a server that shuts down cancels streams that did not
            # end within its grace period.
            return Unavailable(
                f"the {self._server} ended the stream", hint="check that it is not shutting down"
            )
        return fault_of(error, self._server)


def _pauses() -> Iterator[float]:
    """Yield growing pauses in seconds, with jitter so that not all clients reconnect at once."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _event_of(event: pb.JobEvent) -> JobEvent:
    return JobEvent(
        seq=event.seq,
        time=event.time,
        state=JobState(pb.JobState.Name(event.state)),
        reason=event.reason,
        phase=event.phase,
        attempt=event.attempt,
        step=event.step,
        max_steps=event.max_steps,
        metrics=dict(event.metrics),
    )
