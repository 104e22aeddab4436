"""The web application of the dashboard: static pages, JSON, event streams and actions.

Access control is in gate.py, in front of this application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from clients.jobs.job import Job, JobState
from clients.jobs.record import points_of
from clients.jobs.view import WINDOW, JobView
from clients.runs.best_step import JUDGES
from clients.runs.directory import RunDirectory
from distill_server.dashboard.feeds import (
    Turns,
    feed,
    job_messages,
    list_messages,
    log_messages,
    stored_steps,
)
from distill_server.dashboard.gate import STATIC, DashboardGate
from distill_server.dashboard.job_details import (
    attempts_of,
    checkpoints_of,
    details_of,
    evaluation_in,
    preview_in,
    sample_steps,
    samples_of,
)
from distill_server.dashboard.machine import machine_record
from distill_server.dashboard.outcomes import Outcomes, results_table
from distill_server.dashboard.responses import job_record, on_error
from distill_server.dashboard.teachers import Teachers
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.rows import JobFilter, ListOrder
from distill_server.jobs.run_files import SharedReads
from distill_server.jobs.store import JobStore
from distill_server.people.audit import Audit, Entry
from distill_server.places import Places
from distill_server.retention.removals import Removals
from distill_server.rpc.streams import Streams
from distill_server.runners.local.usage import all_gpus, usage_of
from distill_server.runners.machine import Machine
from distill_server.scheduler import Scheduler
from protos.auth.access import Role, Tokens
from protos.errors import DistillError, InvalidInput, NotFound
from protos.rpc.metrics_page import CONTENT_TYPE
from protos.rpc.server import ServerEndpoint
from protos.rpc.transport import is_loopback

_PAGE_JOBS = 50
_TABLE_JOBS = 100
_LOG_LINES = 500
_MAX_SEARCH_CHARS = 100
_MAX_BODY_BYTES = 4 << 10


class _RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Body = TypeVar("_Body", bound=_RequestBody)


class _CancelBody(_RequestBody):
    now: bool = False


class _ResumeBody(_RequestBody):
    max_steps: Annotated[int, Field(ge=0, lt=2**31)] = 0
    from_step: Annotated[int, Field(ge=0, lt=2**31)] = 0


class _PinBody(_RequestBody):
    pinned: bool = True


@dataclass
class Pages:
    """The request handlers: starlette endpoints, which take a request and return a response.

    The handlers raise DistillError, which the application turns into an HTTP error.

    - endpoint: address of the gRPC server.
    - grpc_port: port of the gRPC server; 0 until the port is bound.
    - registry: the Prometheus metrics.
    """

    store: JobStore
    runs: Path
    notifier: ChangeNotifier
    control: JobControl
    removals: Removals
    streams: Streams
    teachers: Teachers
    scheduler: Scheduler
    machine: Machine
    endpoint: ServerEndpoint
    registry: CollectorRegistry
    shared_reads: SharedReads
    audit: Audit
    grpc_port: int = 0
    turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        self.outcomes = Outcomes(self.store)

    async def access(self, request: Request) -> Response:
        """GET /api/access: the caller's role, and whether it may cancel and resume jobs.

        `server` is the address of the gRPC server for the command line.
        """
        role: Role = request.scope["role"]
        return JSONResponse(
            {
                "asks_tokens": bool(self.endpoint.tokens),
                "role": role.name.lower(),
                "may_act": role >= Role.SUBMIT,
                "server": self._grpc_address(request),
            }
        )

    def _grpc_address(self, request: Request) -> str:
        """Return the address of the gRPC server, for users of the dashboard.

        If the server listens on a loopback address, the result is that address. Otherwise the
        result has the host name of the user's request.
        """
        if is_loopback(self.endpoint.host):
            return self.endpoint.address(self.grpc_port)
        public_endpoint = replace(self.endpoint, host=request.url.hostname or self.endpoint.host)
        return public_endpoint.address(self.grpc_port)

    async def jobs(self, request: Request) -> Response:
        """GET /api/jobs: one page of jobs and the counts by state, as JSON.

        Parameters: `state`, `search` (as in JobFilter), `sort` (a key of ListOrder, after "-" for
        the largest value first) and `offset`, the number of jobs to leave out.
        """
        return JSONResponse(await self.turns.run_query(self._page_reader(request)))

    async def table(self, request: Request) -> Response:
        """GET /api/table: the table of `distill table` (outcomes.py) for the newest 100 jobs.

        Parameters: `state` and `search`, as in /api/jobs.
        """
        job_filter = _parse_filter(request)

        def read_table() -> Mapping[str, Any]:
            jobs = self.store.page(limit=_TABLE_JOBS, job_filter=job_filter)
            return results_table(self.outcomes, jobs)

        return JSONResponse(await self.turns.run_query(read_table))

    async def jobs_events(self, request: Request) -> Response:
        """GET /api/events: the page of /api/jobs as an event stream, sent again when it changes."""
        return feed(list_messages(self.notifier, self.turns, self._page_reader(request)))

    def _page_reader(self, request: Request) -> Callable[[], Mapping[str, Any]]:
        """Return a function that reads the requested page from the store at each call."""
        parameters = request.query_params
        offset = _parse_number(parameters.get("offset") or "0", "offset")
        key = parameters.get("sort") or "-submitted"
        order = ListOrder(key.removeprefix("-"), key.startswith("-"))
        job_filter = _parse_filter(request)

        def read_page() -> Mapping[str, Any]:
            jobs = self.store.page(
                limit=_PAGE_JOBS, job_filter=job_filter, order=order, offset=offset
            )
            places = self._read_places()
            return {
                "jobs": [self._build_row(job, places) for job in jobs],
                "counts": self.store.count_by_state(job_filter.search),
                "page": _PAGE_JOBS,
                "capacity": places.capacity(),
            }

        return read_page

    def _read_places(self) -> Places:
        return Places(self.store, self.scheduler, self.machine)

    def _build_row(self, job: Job, places: Places) -> Mapping[str, Any]:
        """Return a job's record with its outcome, its place in the queue and the remaining time.

        The remaining time is computed as in `distill watch`.
        """
        progress = JobView(job.id, attempt=job.attempt, max_steps=job.max_steps)
        if job.state is JobState.RUNNING:
            for event in self.store.events(job.id, max(0, job.last_seq - WINDOW), WINDOW):
                progress.add(event)
        return {
            **job_record(job),
            **places.describe(job),
            **self.outcomes.describe(job),
            "seconds_left": progress.seconds_left,
        }

    async def job(self, request: Request) -> Response:
        """GET /api/jobs/JOB: one job with its configuration and its place in the queue.

        The record also has `summary`, `verdict` and `pipeline` (job_details.py).
        """
        job = self.store.resolve(request.path_params["job"])
        place: Mapping[str, Any] = {}
        if job.state is JobState.QUEUED:
            place = await self.turns.run_query(lambda: self._read_places().describe(job))
        details = await self.turns.run_query(lambda: details_of(self.store, job))
        return JSONResponse({**job_record(job, with_config=True), **place, **details})

    async def attempts(self, request: Request) -> Response:
        """GET /api/jobs/JOB/attempts: times and ends of the newest 50 attempts."""
        job = self.store.resolve(request.path_params["job"])
        records = await self.turns.run_query(lambda: attempts_of(self.store, job))
        return JSONResponse({"attempts": records})

    async def checkpoints(self, request: Request) -> Response:
        """GET /api/jobs/JOB/checkpoints: the newest 100 checkpoints with evaluations."""
        run = self._find_run(request)
        points = await self.turns.run_query(
            lambda: points_of(self.store.evaluations(run.path.name, JUDGES))
        )
        records = await self.shared_reads.read(
            ("checkpoints", run.path.name), partial(checkpoints_of, run, points)
        )
        return JSONResponse({"checkpoints": records})

    async def usage(self, request: Request) -> Response:
        """GET /api/jobs/JOB/usage: CPU time, memory and GPUs of the trainer's processes.

        `usage` is null if the processes are not on this machine or have ended.
        """
        job = self.store.resolve(request.path_params["job"])
        logs = RunDirectory(self.runs / job.id).logs(job.attempt)

        def read_usage() -> Mapping[str, Any] | None:
            usage = usage_of(logs)
            return None if usage is None else {**asdict(usage), "at": time.time()}

        return JSONResponse(
            {"usage": await self.shared_reads.read(("usage", str(logs)), read_usage)}
        )

    async def events(self, request: Request) -> Response:
        """GET /api/jobs/JOB/events: a stream of the job's events after `Last-Event-ID`."""
        job = self.store.resolve(request.path_params["job"])
        after_seq = _parse_number(request.headers.get("last-event-id", "0"), "Last-Event-ID")
        if after_seq > job.last_seq:
            raise InvalidInput(f"job {job.id} has no event {after_seq} yet", field="Last-Event-ID")
        return feed(job_messages(self.store, self.notifier, job.id, after_seq))

    async def steps(self, request: Request) -> Response:
        """GET /api/jobs/JOB/steps: the stored events after the event `after`, by default all.

        The record has:

        - state: state of the job.
        - last_seq: number of the job's newest event.
        - events: the events in columns (responses.py).
        - extremes: extreme values of the deleted events; null unless `after` is 0.
        """
        job = self.store.resolve(request.path_params["job"])
        after_seq = _parse_number(request.query_params.get("after", "0"), "after")
        record = await self.turns.run_query(lambda: stored_steps(self.store, job.id, after_seq))
        return JSONResponse(record)

    async def log(self, request: Request) -> Response:
        """GET /api/jobs/JOB/log: a stream of an attempt's log; `attempt` defaults to the newest.

        The stream starts after `Last-Event-ID` (ATTEMPT:OFFSET) if this id is of the same attempt,
        else with the last 500 lines.
        """
        job = self.store.resolve(request.path_params["job"])
        attempt, _, offset = request.headers.get("last-event-id", "0:0").partition(":")
        requested_attempt = _parse_number(
            request.query_params.get("attempt", str(job.attempt)), "attempt"
        )
        is_same_attempt = _parse_number(attempt, "Last-Event-ID") == requested_attempt
        pieces = self.streams.log(
            job.id,
            attempt=requested_attempt,
            after_offset=_parse_number(offset, "Last-Event-ID") if is_same_attempt else 0,
            follow=True,
            tail_lines=0 if is_same_attempt else _LOG_LINES,
        )
        return feed(log_messages(pieces))

    async def sample_steps(self, request: Request) -> Response:
        """GET /api/jobs/JOB/samples: the steps that have transcripts, newest first."""
        return await self._list_steps(self._find_run(request).samples)

    async def samples(self, request: Request) -> Response:
        """GET /api/jobs/JOB/samples/STEP: the first transcripts of a step."""
        return await self._read_samples(self._find_run(request).samples, request)

    async def token_steps(self, request: Request) -> Response:
        """GET /api/jobs/JOB/tokens: the steps that have log-probs of tokens, newest first."""
        return await self._list_steps(self._find_run(request).token_logprobs)

    async def tokens(self, request: Request) -> Response:
        """GET /api/jobs/JOB/tokens/STEP: log-probs of held-out tokens at a step."""
        return await self._read_samples(self._find_run(request).token_logprobs, request)

    async def _list_steps(self, folder: Path) -> Response:
        return JSONResponse({"steps": await self.streams.files.call(partial(sample_steps, folder))})

    async def _read_samples(self, folder: Path, request: Request) -> Response:
        read_samples = partial(samples_of, folder, request.path_params["step"])
        return JSONResponse({"samples": await self.streams.files.call(read_samples)})

    async def evaluation(self, request: Request) -> Response:
        """GET /api/jobs/JOB/evaluation: the results of an `eval` job by model, or null."""
        read_models = partial(evaluation_in, self._find_run(request))
        return JSONResponse({"models": await self.streams.files.call(read_models)})

    async def preview(self, request: Request) -> Response:
        """GET /api/jobs/JOB/preview: the preview of the training data; null before the start."""
        run = self._find_run(request)
        return JSONResponse({"preview": await self.streams.files.call(partial(preview_in, run))})

    async def cancel(self, request: Request) -> Response:
        """POST /api/jobs/JOB/cancel with {"now": BOOL}: cancel the job and return it."""
        body = await _parse_body(request, _CancelBody)
        with self._record_audit("CancelJob", request) as entry:
            job = await self.control.cancel(request.path_params["job"], now=body.now)
            entry.about = (job.id,)
        return JSONResponse(job_record(job))

    async def resume(self, request: Request) -> Response:
        """POST /api/jobs/JOB/resume with {"max_steps": N, "from_step": N}: resume the job."""
        body = await _parse_body(request, _ResumeBody)
        with self._record_audit("ResumeJob", request) as entry:
            job = await self.control.resume_checked(
                request.path_params["job"], max_steps=body.max_steps, from_step=body.from_step
            )
            entry.about = (job.id,)
        return JSONResponse(job_record(job))

    async def remove(self, request: Request) -> Response:
        """POST /api/jobs/JOB/remove with {}: remove the job with its files, and return it."""
        await _parse_body(request, _RequestBody)
        with self._record_audit("RemoveJob", request) as entry:
            job = self.removals.remove(request.path_params["job"])
            entry.about = (job.id,)
        return JSONResponse(job_record(job))

    async def pin(self, request: Request) -> Response:
        """POST /api/jobs/JOB/pin with {"pinned": BOOL}: pin or unpin the job and return it."""
        body = await _parse_body(request, _PinBody)
        with self._record_audit("PinJob", request) as entry:
            job = self.removals.pin(request.path_params["job"], pinned=body.pinned)
            entry.about = (job.id,)
        return JSONResponse(job_record(job))

    def _record_audit(self, action: str, request: Request) -> AbstractContextManager[Entry]:
        client = request.client
        peer = f"http:{client.host}:{client.port}" if client else "http"
        job_id = request.path_params["job"]
        with suppress(DistillError):
            job_id = self.store.resolve(job_id).id
        return self.audit.entry(action, request.scope["caller"], peer, job_id)

    async def list_teachers(self, request: Request) -> Response:
        """GET /api/teachers: load and cache of the teachers of active jobs."""
        return JSONResponse({"teachers": await self.teachers.list_records()})

    async def read_machine(self, request: Request) -> Response:
        """GET /api/machine: the jobs and teachers that hold resources, the queue and the GPUs."""
        gpus = await self.shared_reads.read(("gpus",), all_gpus)
        record = await self.turns.run_query(
            lambda: machine_record(self.store, self._read_places(), self.scheduler.teachers, gpus)
        )
        return JSONResponse(record)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the server's metrics in the text format of Prometheus."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE)

    def _find_run(self, request: Request) -> RunDirectory:
        return RunDirectory(self.runs / self.store.resolve(request.path_params["job"]).id)


def make_app(pages: Pages, *, tokens: Tokens, host: str, external: str = "") -> ASGIApp:
    """Build the application with its access control.

    `host` is the address that the application listens on, `external` the host name of a proxy in
    front of the application.
    """
    job_path = "/api/jobs/{job}"
    routes = [
        Route("/api/access", pages.access),
        Route("/api/jobs", pages.jobs),
        Route("/api/table", pages.table),
        Route("/api/events", pages.jobs_events),
        Route(job_path, pages.job),
        Route(f"{job_path}/events", pages.events),
        Route(f"{job_path}/steps", pages.steps),
        Route(f"{job_path}/log", pages.log),
        Route(f"{job_path}/attempts", pages.attempts),
        Route(f"{job_path}/checkpoints", pages.checkpoints),
        Route(f"{job_path}/usage", pages.usage),
        Route(f"{job_path}/preview", pages.preview),
        Route(f"{job_path}/samples", pages.sample_steps),
        Route(f"{job_path}/samples/{{step:int}}", pages.samples),
        Route(f"{job_path}/tokens", pages.token_steps),
        Route(f"{job_path}/tokens/{{step:int}}", pages.tokens),
        Route(f"{job_path}/evaluation", pages.evaluation),
        Route(f"{job_path}/cancel", pages.cancel, methods=["POST"]),
        Route(f"{job_path}/resume", pages.resume, methods=["POST"]),
        Route(f"{job_path}/remove", pages.remove, methods=["POST"]),
        Route(f"{job_path}/pin", pages.pin, methods=["POST"]),
        Route("/api/teachers", pages.list_teachers),
        Route("/api/machine", pages.read_machine),
        Route("/metrics", pages.metrics),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    error_handlers: Mapping[Any, Any] = {
        DistillError: on_error,
        HTTPException: _on_http_error,
        Exception: on_error,
    }
    app = Starlette(routes=routes, exception_handlers=error_handlers)
    return DashboardGate(
        app, tokens=tokens, host=host, external=external, on_refusal=pages.audit.record_refusal
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = await on_error(request, NotFound(f"{request.method} {request.url.path}: no such page"))
    answer.status_code = error.status_code
    return answer


async def _parse_body(request: Request, kind: type[_Body]) -> _Body:
    """Parse the request body, a JSON object of at most 4 KiB. Raises InvalidInput."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidInput(
                f"the request body is longer than {_MAX_BODY_BYTES} bytes", field="body"
            )
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first_problem = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first_problem["loc"])
        raise InvalidInput(first_problem["msg"], field=path or "body") from error


def _parse_filter(request: Request) -> JobFilter:
    """Parse the parameters `state` and `search`. Raises InvalidInput."""
    state = _parse_state(request.query_params.get("state"))
    search = request.query_params.get("search", "")
    if len(search) > _MAX_SEARCH_CHARS:
        raise InvalidInput(
            f"the search is longer than {_MAX_SEARCH_CHARS} characters", field="search"
        )
    return JobFilter(search, [state] if state else [])


def _parse_state(name: str | None) -> JobState | None:
    if name and name not in JobState.__members__:
        raise InvalidInput(f"there is no job state {name!r}", field="state")
    return JobState(name) if name else None


def _parse_number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidInput(f"{text[:20]!r} is not a whole number", field=field)
    return int(text)
