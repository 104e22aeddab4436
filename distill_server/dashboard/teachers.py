"""Current load and cache statistics of the teachers of active jobs.

A teacher that does not answer delays the result by two seconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import grpc

from clients.jobs.job import Job, JobState
from clients.teacher.info import info_of, load_of
from distill_server.dashboard.responses import fault_record
from distill_server.jobs.store import JobStore
from distill_server.teachers.started import Teacher
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError
from protos.rpc.channel import TEACHER_TOKEN, open_channel
from protos.rpc.statuses import fault_of

_ANSWER_SECONDS = 2.0
# A teacher is asked at most once in this time, however many users view the page.
_FRESH_SECONDS = 2.0
_MOST_TEACHERS = 32
_ACTIVE = (JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING)


class Teachers:
    """Requests info from each teacher and shares the result among all viewers for two seconds."""

    def __init__(self, store: JobStore, started: Iterable[Teacher]) -> None:
        """`started` are the teachers that the server runs."""
        self._store = store
        self._started = started
        self._lock = asyncio.Lock()
        # A pool of its own: the event loop's few default threads read files for clients and must
        # not wait for teachers that do not answer.
        self._threads = ThreadPoolExecutor(_MOST_TEACHERS, "teachers")
        self._seen: list[dict[str, Any]] = []
        self._seen_at = -_FRESH_SECONDS

    async def look(self) -> Sequence[Mapping[str, Any]]:
        """Return one record per teacher: `address`, `jobs` (ids), and `info`, `load` and `at`.

        A teacher that fails has `fault`, the error's record, in place of the last three. At most 32
        teachers are listed.
        """
        async with self._lock:
            if time.monotonic() - self._seen_at >= _FRESH_SECONDS:
                jobs = addresses(self._store.in_state(*_ACTIVE))
                users = self._store.users_of_teachers()
                jobs |= {one.address: list(users.get(one.key, ())) for one in self._started}
                jobs.pop("", None)  # of those that do not listen yet
                shown = sorted(jobs)[:_MOST_TEACHERS]
                loop = asyncio.get_running_loop()
                asked = (loop.run_in_executor(self._threads, _ask, one) for one in shown)
                answers = await asyncio.gather(*asked)
                self._seen = [
                    {"address": address, "jobs": jobs[address], **answer}
                    for address, answer in zip(shown, answers, strict=True)
                ]
                self._seen_at = time.monotonic()
            return self._seen


def addresses(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Return the ids of the jobs by the address of each teacher that they use."""
    found: dict[str, list[str]] = {}
    for job in jobs:
        for address in dict.fromkeys(_addresses(json.loads(job.config_json))):
            found.setdefault(address, []).append(job.id)
    return found


def _addresses(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the teacher addresses of a job: `teacher.address`, or those of all `teachers`."""
    several, teacher = config.get("teachers") or {}, config.get("teacher") or {}
    alone = None if teacher.get("model") else teacher.get("address")
    for given in several.values() if several else [alone]:
        yield from [given] if isinstance(given, str) else given or ()


def _ask(address: str) -> dict[str, Any]:
    try:
        with open_channel(address, token=TEACHER_TOKEN, scope="dashboard") as channel:
            stub = teacher_pb2_grpc.TeacherStub(channel)
            said = stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=_ANSWER_SECONDS)
    except grpc.RpcError as error:
        return {"fault": fault_record(fault_of(error, f"teacher {address}"))}
    except DistillError as fault:
        return {"fault": fault_record(fault)}
    return {"info": asdict(info_of(said)), "load": asdict(load_of(said)), "at": time.time()}
