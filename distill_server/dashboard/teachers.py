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
from distill_server.teachers.started import TeacherProcess
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError
from protos.rpc.channel import TEACHER_TOKEN, open_channel
from protos.rpc.statuses import fault_of

_ANSWER_SECONDS = 2.0
# A teacher gets at most one request in this many seconds, for any number of viewers.
_FRESH_SECONDS = 2.0
_MAX_TEACHERS = 32
_ACTIVE = (JobState.PREPARING, JobState.RUNNING, JobState.CANCELLING)


class Teachers:
    """Requests info from each teacher and shares the result among all viewers for two seconds."""

    def __init__(self, store: JobStore, started_teachers: Iterable[TeacherProcess]) -> None:
        """`started_teachers` are the teachers that the server runs."""
        self._store = store
        self._started_teachers = started_teachers
        self._lock = asyncio.Lock()
        # A separate pool: the event loop's default threads read files for clients, and must not
        # wait for teachers that do not answer.
        self._threads = ThreadPoolExecutor(_MAX_TEACHERS, "teachers")
        self._records: list[dict[str, Any]] = []
        self._records_at = -_FRESH_SECONDS

    async def list_records(self) -> Sequence[Mapping[str, Any]]:
        """Return one record per teacher, at most 32.

        - address: "" before the teacher listens.
        - jobs: the ids of the active jobs that use the teacher. The value of each id is the part of
          the time of the job's newest step that the job waited for its teachers, from 0 to 1; null
          if unknown.
        - waiting: the ids of the queued jobs that wait until the teacher answers.
        - info, load: the teacher's answer. at: Unix time of the answer, in seconds.
        - fault: the record of the error, in place of `info`, `load` and `at`, if the teacher fails.
          A teacher that does not listen yet has none of these four keys.
        - process: only for a teacher that this server runs: `model`, `engine`, `state` (see
          TeacherProcess), `stage` of its start, `gpus`, `since`, `attempt`, and `reason` of its
          last end.
        """
        async with self._lock:
            if time.monotonic() - self._records_at >= _FRESH_SECONDS:
                records = self._collect()[:_MAX_TEACHERS]
                loop = asyncio.get_running_loop()
                requests = (
                    loop.run_in_executor(self._threads, _request_info, record["address"])
                    for record in records
                )
                answers = await asyncio.gather(*requests)
                self._records = [
                    {**record, **answer} for record, answer in zip(records, answers, strict=True)
                ]
                self._records_at = time.monotonic()
            return self._records

    def _collect(self) -> list[dict[str, Any]]:
        """Return the records of all teachers, without the answers of the teachers."""
        jobs = jobs_by_address(self._store.in_state(*_ACTIVE))
        waiting = jobs_by_address(self._store.waiting_jobs())
        records = [
            {
                "address": address,
                "jobs": self._waits(jobs.get(address, ())),
                "waiting": waiting.get(address, []),
            }
            for address in sorted({*jobs, *waiting})
        ]
        users = self._store.users_of_teachers()
        for teacher in self._started_teachers:
            job_ids = users.get(teacher.key, ())
            process = {
                **{"model": teacher.record.link.model, "engine": teacher.record.link.engine},
                **{"state": teacher.state, "stage": teacher.stage, "since": teacher.since},
                **{"gpus": teacher.record.gpus, "attempt": teacher.record.attempt},
                "reason": teacher.failure or teacher.trouble,
            }
            address = teacher.address
            if address:
                records = [record for record in records if record["address"] != address]
            records.append(
                {
                    "address": address,
                    "jobs": self._waits(job_ids),
                    "waiting": [],
                    "process": process,
                }
            )
        return records

    def _waits(self, job_ids: Iterable[str]) -> dict[str, float | None]:
        """Return the part of the newest step's time that each job waited for its teachers.

        The parts are from 0 to 1, by the id of the job; None if the job has not measured it.
        """
        shares: dict[str, float | None] = {}
        for job_id in job_ids:
            metrics = self._store.job(job_id).metrics
            seconds, wait = metrics.get("time/step"), metrics.get("time/teacher_wait")
            shares[job_id] = wait / seconds if seconds and wait is not None else None
        return shares


def jobs_by_address(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Return the ids of the jobs by the address of a teacher.

    A job that uses several teachers is listed for each of their addresses.
    """
    job_ids: dict[str, list[str]] = {}
    for job in jobs:
        for address in dict.fromkeys(_iter_addresses(json.loads(job.config_json))):
            job_ids.setdefault(address, []).append(job.id)
    return job_ids


def _iter_addresses(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the teacher addresses of a job: `teacher.address`, or all addresses of `teachers`."""
    teachers, teacher = config.get("teachers") or {}, config.get("teacher") or {}
    own_address = None if teacher.get("model") else teacher.get("address")
    for address_or_list in teachers.values() if teachers else [own_address]:
        yield from [address_or_list] if isinstance(address_or_list, str) else address_or_list or ()


def _request_info(address: str) -> dict[str, Any]:
    if not address:  # a teacher that does not listen yet
        return {}
    try:
        with open_channel(address, token=TEACHER_TOKEN, scope="dashboard") as channel:
            stub = teacher_pb2_grpc.TeacherStub(channel)
            reply = stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=_ANSWER_SECONDS)
    except grpc.RpcError as error:
        return {"fault": fault_record(fault_of(error, f"teacher {address}"))}
    except DistillError as fault:
        return {"fault": fault_record(fault)}
    return {"info": asdict(info_of(reply)), "load": asdict(load_of(reply)), "at": time.time()}
