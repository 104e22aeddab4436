"""The gRPC service of protos/distill.proto.

Its methods decode the request, call other parts of the server, and encode the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from clients.jobs.artifacts import artifact_root
from clients.jobs.job import Job, JobState
from clients.runs.directory import NOTES, RunDirectory
from clients.teacher.info import TeacherLoad, load_of
from distill_server.jobs.control import JobControl, Submission
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import JobStore
from distill_server.people.audit import Audit, audited, audited_stream
from distill_server.places import Places
from distill_server.retention.removals import Removals
from distill_server.rpc.artifacts import notes_root, read_pieces
from distill_server.rpc.encode import (
    decode_filter,
    encode_event,
    encode_job,
    encode_teacher,
)
from distill_server.rpc.streams import Streams
from distill_server.teachers.started import TeacherProcess
from distill_server.uploads import UploadFile, Uploads
from protos import distill_pb2 as pb
from protos import distill_pb2_grpc, teacher_pb2, teacher_pb2_grpc
from protos.auth.access import Caller, Tokens
from protos.errors import DistillError
from protos.rpc.channel import TEACHER_TOKEN, open_channel
from protos.rpc.transport import MAX_PAGE_JOBS, STREAM_OPEN

SERVICE = pb.DESCRIPTOR.services_by_name["Distill"].full_name
_PAGE_JOBS = 50

# This alias is a string, because the type stubs give the class two type parameters that the class
# lacks at run time.
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_ANSWER_SECONDS = 1.0


class DistillService(distill_pb2_grpc.DistillServicer):
    """Serves jobs over gRPC. An interceptor turns each DistillError into a gRPC status.

    Every `job_id` may be an id, an unambiguous prefix of an id, or `@last`.
    """

    def __init__(
        self,
        store: JobStore,
        runs: Path,
        control: JobControl,
        streams: Streams,
        removals: Removals,
        files: RunFiles | None = None,
        teachers: Iterable[TeacherProcess] = (),
        uploads: Uploads | None = None,
        audit: Audit | None = None,
        tokens: Tokens | None = None,
        read_places: Callable[[], Places] | None = None,
    ) -> None:
        self._store = store
        self._runs = runs
        self._control = control
        self._streams = streams
        self._removals = removals
        self._files = files or RunFiles()
        self._teachers = teachers
        self._uploads = uploads or Uploads(runs)
        self.audit = audit or Audit(None)
        self._tokens = tokens or Tokens()
        self._read_places = read_places

    def caller(self, context: _Context) -> Caller:
        """Return the caller of the current call."""
        return self._tokens.caller_in(context.invocation_metadata())

    def job_id_of(self, text: str) -> str:
        """Return the id of the job that `text` names, or `text` if there is none."""
        with suppress(DistillError):
            return self._store.resolve(text).id
        return text

    @audited
    async def SubmitJob(self, request: pb.SubmitJobRequest, context: _Context) -> pb.Job:
        """Check and queue a job; a repeated idempotency key returns the job of its first use."""
        owner = self.caller(context).owner
        job = await self._control.submit_checked(*_read_submission(request), owner)
        return self._encode_jobs([job])[0]

    async def CheckJob(self, request: pb.CheckJobRequest, context: _Context) -> pb.CheckJobResponse:
        """Check a job as SubmitJob does, without queueing it."""
        await self._control.check(request.config_json, owner=self.caller(context).owner)
        return pb.CheckJobResponse()

    @audited
    async def SubmitJobs(
        self, request: pb.SubmitJobsRequest, context: _Context
    ) -> pb.SubmitJobsResponse:
        """Check and queue all of the jobs, or none; with `check_only`, queue none."""
        owner = self.caller(context).owner
        if request.check_only:
            await self._control.check(*(job.config_json for job in request.jobs), owner=owner)
            return pb.SubmitJobsResponse()
        jobs = await self._control.submit_all(
            [_read_submission(job) for job in request.jobs], owner
        )
        return pb.SubmitJobsResponse(jobs=self._encode_jobs(jobs))

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.Job:
        """Return one job with its configuration and the steps of its checkpoints.

        If the run directory does not answer, the steps are missing. The phase of an active job
        then says so, because the scheduler also waits for the directory.
        """
        job = self._store.resolve(request.job_id)
        checkpoints: tuple[int, ...] = ()
        with suppress(OSError):
            run = RunDirectory(self._runs / job.id)
            checkpoints = await self._files.call(run.checkpoint_steps)
        [job] = self._explain_waits([self._store.job(job.id)])
        [message] = self._encode_jobs([job])
        message.config_json = job.config_json
        message.checkpoints.extend(checkpoints)
        return message

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context) -> pb.ListJobsResponse:
        """Return one page of jobs, newest first, without their configurations."""
        before_id = self._store.resolve(request.before_id).id if request.before_id else ""
        limit = min(request.limit or _PAGE_JOBS, MAX_PAGE_JOBS)
        now = self._store.now()
        job_filter = decode_filter(request, self.caller(context), now)
        jobs = self._store.page(limit=limit, before_id=before_id, job_filter=job_filter)
        return pb.ListJobsResponse(jobs=self._encode_jobs(self._explain_waits(jobs)), time=now)

    def _encode_jobs(self, jobs: Sequence[Job]) -> Sequence[pb.Job]:
        dependencies = self._store.dependencies.read([job.id for job in jobs])
        return [encode_job(job, dependencies.get(job.id, ())) for job in jobs]

    def _explain_waits(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return the jobs with phases that explain the waits of queued jobs.

        If the phase of a queued job is empty, it becomes the place in the queue and the reason to
        wait.
        """
        is_waiting = [job.state is JobState.QUEUED and not job.phase for job in jobs]
        if self._read_places is None or not any(is_waiting):
            return jobs
        places = self._read_places()
        return [
            replace(job, phase=places.phase_of(job)) if waits else job
            for job, waits in zip(jobs, is_waiting, strict=True)
        ]

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: _Context
    ) -> AsyncIterator[pb.JobEvent]:
        """Stream the events of a job after `after_seq` until the job has ended."""
        await context.send_initial_metadata((STREAM_OPEN,))
        async for event in self._streams.events(request.job_id, request.after_seq):
            yield encode_event(event)

    async def StreamLogs(
        self, request: pb.StreamLogsRequest, context: _Context
    ) -> AsyncIterator[pb.LogChunk]:
        """Stream the log of one attempt from `after_offset`, or its last `tail_lines` lines."""
        await context.send_initial_metadata((STREAM_OPEN,))
        pieces = self._streams.log(
            request.job_id,
            attempt=request.attempt,
            after_offset=request.after_offset,
            follow=request.follow,
            tail_lines=request.tail_lines,
        )
        async for piece in pieces:
            yield pb.LogChunk(data=piece.data, next_offset=piece.next_offset, attempt=piece.attempt)

    @audited
    async def CancelJob(self, request: pb.CancelJobRequest, context: _Context) -> pb.Job:
        """Cancel a job, after a last checkpoint unless `now`; repeated calls have no effect."""
        job = await self._control.cancel(request.job_id, now=request.now)
        return self._encode_jobs([job])[0]

    @audited
    async def ResumeJob(self, request: pb.ResumeJobRequest, context: _Context) -> pb.Job:
        """Queue a new attempt of a job that has ended."""
        job = await self._control.resume_checked(
            request.job_id, max_steps=request.max_steps, from_step=request.from_step
        )
        return self._encode_jobs([job])[0]

    @audited
    async def RemoveJob(self, request: pb.RemoveJobRequest, context: _Context) -> pb.Job:
        """Remove a job that has ended, with its events and, after the reply, its files."""
        return encode_job(self._removals.remove(request.job_id))

    @audited
    async def PinJob(self, request: pb.PinJobRequest, context: _Context) -> pb.Job:
        """Pin a job, so that it is not removed, or unpin it; repeated calls have no effect."""
        job = self._removals.pin(request.job_id, pinned=request.pinned)
        return self._encode_jobs([job])[0]

    async def ListTeachers(
        self, request: pb.ListTeachersRequest, context: _Context
    ) -> pb.ListTeachersResponse:
        """Return the teachers that the server runs."""
        users = self._store.users_of_teachers()
        loads = await request_loads(self._teachers, self._files)
        return pb.ListTeachersResponse(
            teachers=[
                encode_teacher(teacher, users.get(teacher.key, ()), loads.get(teacher.key))
                for teacher in self._teachers
            ]
        )

    @audited
    async def BeginUpload(
        self, request: pb.BeginUploadRequest, context: _Context
    ) -> pb.BeginUploadResponse:
        """Return the path of the upload if it is complete, else the parts that are missing."""
        files = [UploadFile(file.path, file.size, file.sha256) for file in request.files]
        path, missing = await self._files.start(partial(self._uploads.begin, files))
        missing_files = [pb.MissingFile(sha256=file.sha256, offset=file.offset) for file in missing]
        return pb.BeginUploadResponse(path=str(path or ""), missing=missing_files)

    @audited
    async def SendFiles(
        self, request: AsyncIterator[pb.FilePart], context: _Context
    ) -> pb.SendFilesResponse:
        """Write parts of files in the order of arrival; a complete file is verified."""
        async for part in request:
            receive = partial(self._uploads.receive, part.sha256, part.offset, part.data)
            await self._files.start(receive)
        return pb.SendFilesResponse()

    @audited_stream
    async def GetArtifact(
        self, request: pb.GetArtifactRequest, context: _Context
    ) -> AsyncIterator[pb.ArtifactChunk]:
        """Stream the files of an export, a checkpoint or a store, or the job's notes.

        After a broken connection, the next call continues with the file `path` at byte `offset`.
        """
        await context.send_initial_metadata((STREAM_OPEN,))
        job = self._store.resolve(request.job_id)
        run = RunDirectory(self._runs / job.id)
        step = request.checkpoint_step or None
        find = notes_root if request.notes else partial(artifact_root, step=step)
        root = await self._files.call(partial(find, job, run))
        names, begin = NOTES if request.notes else (), (request.path, request.offset)
        async for piece in read_pieces(root, names, self._files, begin=begin):
            yield pb.ArtifactChunk(
                path=piece.path,
                offset=piece.offset,
                data=piece.data,
                last=piece.last,
                sha256=piece.sha256,
            )


def _read_submission(request: pb.SubmitJobRequest) -> Submission:
    return request.config_json, request.config_text, request.idempotency_key


async def request_loads(
    teachers: Iterable[TeacherProcess], threads: RunFiles
) -> Mapping[str, TeacherLoad]:
    """Return the load of each teacher that answers within a second, by its key."""
    requests = {
        teacher.key: threads.start(partial(_request_load, teacher.address))
        for teacher in teachers
        if teacher.address
    }
    answers = await asyncio.gather(*requests.values())
    return {key: load for key, load in zip(requests, answers, strict=True) if load is not None}


def _request_load(address: str) -> TeacherLoad | None:
    try:
        with open_channel(address, token=TEACHER_TOKEN, scope="list") as channel:
            stub = teacher_pb2_grpc.TeacherStub(channel)
            return load_of(stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=_ANSWER_SECONDS))
    except (grpc.RpcError, DistillError):
        return None
