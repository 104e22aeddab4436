"""Jobs on a `distill-server`, from Python.

with DistillClient("localhost:50051") as client:
    job = client.submit(config)
    for event in client.watch(job.id):
        print(event.step, event.metrics)
    client.pull(job.id, "student/")
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
from clients.jobs.job import TERMINAL, Job, JobEvent, JobState
from clients.jobs.record import points_of
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import DistillError, TimedOut, Unavailable
from protos.rpc.channel import SERVER_TOKEN, open_channel
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_PAGE_JOBS, STREAM_OPEN

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

# A server that restarts is back within this: a unary call waits so long, a stream is patient.
_RESTART_SECONDS = 1.5
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class DistillClient:
    """A connection to one server; safe to share between threads.

    Methods raise protos.errors only: Unavailable when the server is not there. `timeout`: seconds
    for one call, but not for a stream. `patience_seconds`: how long a stream waits for a server
    that went away.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout: float = 10.0,
        patience_seconds: float = 60.0,
    ) -> None:
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
        self._channel.close()

    def submit(
        self, config: AnyJob, *, config_text: str = "", idempotency_key: str | None = None
    ) -> Job:
        """Queue a job. Submitting again under the same key returns the same job."""
        request = pb.SubmitJobRequest(
            config_json=config.model_dump_json(),
            config_text=config_text,
            # Made here, so that the tries of one call never make two jobs.
            idempotency_key=idempotency_key or secrets.token_hex(16),
        )
        return _job_of(self._call(self._stub.SubmitJob, request))

    def check(self, config: AnyJob) -> None:
        """Raises what `submit` would for this job now, and queues nothing."""
        request = pb.CheckJobRequest(config_json=config.model_dump_json())
        self._call(self._stub.CheckJob, request, again=False)

    def get(self, job_id: str) -> Job:
        """A job by its id, an unambiguous beginning of it, or "@last"; with its config_json."""
        return _job_of(self._call(self._stub.GetJob, pb.GetJobRequest(job_id=job_id)))

    def list(
        self, *, state: JobState | None = None, limit: int = 50, before_id: str = ""
    ) -> list[Job]:
        """Jobs, newest first; the next page starts before the last one's id."""
        number = pb.JobState.Value(state) if state else pb.JOB_STATE_UNSPECIFIED
        jobs: list[Job] = []
        while len(jobs) < limit:
            asked = min(limit - len(jobs), MAX_PAGE_JOBS)
            request = pb.ListJobsRequest(state=number, limit=asked, before_id=before_id)
            page = self._call(self._stub.ListJobs, request).jobs
            jobs += map(_job_of, page)
            if len(page) < asked:
                break
            before_id = page[-1].id
        return jobs

    def cancel(self, job_id: str, *, now: bool = False) -> Job:
        """Stop a job after a last checkpoint, or `now`. Returns at once; `wait` for the end."""
        request = pb.CancelJobRequest(job_id=job_id, now=now)
        return _job_of(self._call(self._stub.CancelJob, request))

    def resume(
        self, job_id: str, *, max_steps: int | None = None, from_step: int | None = None
    ) -> Job:
        """One more attempt of a job that ended, from its newest checkpoint or `from_step`."""
        request = pb.ResumeJobRequest(
            job_id=job_id, max_steps=max_steps or 0, from_step=from_step or 0
        )
        # Once only: after an answer that was lost, a second try would meet a job that already runs.
        return _job_of(self._call(self._stub.ResumeJob, request, again=False))

    def watch(
        self, job_id: str, after_seq: int = 0, *, timeout: float | None = None
    ) -> Iterator[JobEvent]:
        """Every event after `after_seq` until the job is over, each once, across server restarts.

        Raises Unavailable after `patience_seconds` without a server, and TimedOut after `timeout`
        seconds: the job goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # A prefix, or "@last", may mean another job when the stream is opened again.
        job_id = self.get(job_id).id
        try:
            yield from self._events(job_id, after_seq, deadline)
        except TimedOut as error:
            hint = "it goes on; watch it again, or cancel it"
            raise TimedOut(f"job {job_id} is not over after {timeout:g} s", hint=hint) from error

    def history(self, job_id: str) -> Sequence[JobEvent]:
        """Every event up to now."""
        job = self.get(job_id)
        events: list[JobEvent] = []
        with closing(self._events(job.id, 0, deadline=None)) as stream:
            while len(events) < job.last_seq and (event := next(stream, None)) is not None:
                events.append(event)
        return events

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The job once it is over; raises TimedOut after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        job = self.get(job_id)
        while job.state not in TERMINAL:
            try:
                for _ in self._events(job.id, job.last_seq, deadline):
                    pass
            except TimedOut as error:
                raise TimedOut(f"job {job.id} is not over after {timeout:g} s") from error
            job = self.get(job.id)
        return job

    def logs(
        self, job_id: str, *, attempt: int = 0, follow: bool = False, tail_lines: int = 0
    ) -> Iterator[bytes]:
        """The log of an attempt (0: the newest) from its start or its last lines on, no byte twice.

        With `follow`, until the attempt is over; it reconnects like `watch`.
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
        """Download a job's export, or one of its checkpoints, into a new directory.

        `checkpoint`: a step, "best" (as `clients.jobs.artifacts` defines it) or "last".
        `pull_run` in `clients.jobs.artifacts` does the same from a run directory.

        All of it or nothing. Raises WrongState with the reason when the job failed, InvalidInput
        when `destination` has content, Corrupt when bytes do not match their checksum.
        """
        if isinstance(checkpoint, str):
            job = self.get(job_id)
            job_id = job.id
            checkpoint = checkpoint_step(job, checkpoint, lambda: points_of(self.history(job_id)))
        request = pb.GetArtifactRequest(job_id=job_id, checkpoint_step=checkpoint or 0)
        return self._pull(request, Path(destination))

    def pull_notes(self, job_id: str, destination: Path | str) -> Path:
        """Download environment.json and samples/, of a job in any state, into a new directory.

        Raises NotFound when the job has neither yet.
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
        """A unary call within the timeout; `again`: once more if the server was not there (what
        names a field is its answer: the teacher of a job was not there).
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
        """The messages of a stream that is opened again, where it was, when its server left."""
        away_since: float | None = None
        pauses = _pauses()
        while True:
            # grpc's own type of a call does not say that it is also one's handle on it.
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
        """A little while, for a connection: one that dies again and again is there for moments."""
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(min(_LONGEST_PAUSE_SECONDS, max(0.0, until - time.monotonic())))
        except grpc.FutureTimeoutError:
            ready.cancel()

    def _fault_of_stream(self, error: grpc.RpcError) -> DistillError:
        call: Any = error
        if call.code() is grpc.StatusCode.CANCELLED:
            # Not by us: a server that stops cancels what did not end within its grace.
            return Unavailable(f"the {self._server} ended the stream", hint="is it going away?")
        return fault_of(error, self._server)


def _pauses() -> Iterator[float]:
    """Growing, with jitter: clients of a restarted server should not all call at once."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _job_of(job: pb.Job) -> Job:
    return Job(
        id=job.id,
        name=job.name,
        kind=job.kind,
        state=JobState(pb.JobState.Name(job.state)),
        reason=job.reason,
        phase=job.phase,
        attempt=job.attempt,
        step=job.step,
        max_steps=job.max_steps,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        last_seq=job.last_seq,
        metrics=dict(job.metrics),
        config_json=job.config_json,
        checkpoints=tuple(job.checkpoints),
    )


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
