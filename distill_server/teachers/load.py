"""Asks the teachers that the server runs how much they have to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

import grpc

from clients.teacher.info import TeacherLoad, load_of
from distill_server.jobs.run_files import RunFiles
from distill_server.teachers.started import Teacher
from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import DistillError
from protos.rpc.channel import TEACHER_TOKEN, open_channel

_ANSWER_SECONDS = 1.0


async def loads_of(teachers: Iterable[Teacher], threads: RunFiles) -> Mapping[str, TeacherLoad]:
    """Return the load of each teacher that answers within a second, by its key."""
    asked = {one.key: threads.start(partial(_ask, one.address)) for one in teachers if one.address}
    answers = await asyncio.gather(*asked.values())
    return {key: load for key, load in zip(asked, answers, strict=True) if load is not None}


def _ask(address: str) -> TeacherLoad | None:
    try:
        with open_channel(address, token=TEACHER_TOKEN, scope="list") as channel:
            stub = teacher_pb2_grpc.TeacherStub(channel)
            return load_of(stub.GetInfo(teacher_pb2.GetInfoRequest(), timeout=_ANSWER_SECONDS))
    except (grpc.RpcError, DistillError):
        return None
