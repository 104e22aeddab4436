"""Requests the current load of the teachers that the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

import grpc

from clients.teacher.info import TeacherLoad, load_of
from distill_server.jobs.run_files import RunFiles
from distill_server.teachers.started import TeacherProcess
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError
from protos.rpc.channel import TEACHER_TOKEN, open_channel

_ANSWER_SECONDS = 1.0


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
