"""A minimal teacher service for tests: python -m tests.protos.rpc.stub_server"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from protos import teacher_pb2, teacher_pb2_grpc
from protos.errors import InvalidInput, Overloaded
from protos.rpc.server import ServerEndpoint, serve


class StubTeacher(teacher_pb2_grpc.TeacherServicer):
    async def GetInfo(self, request: Any, context: Any) -> teacher_pb2.TeacherInfo:
        raise InvalidInput("it is too long: \u00e9", field="name[3]", hint="shorten it")

    async def GetVocabulary(self, request: Any, context: Any) -> Any:
        yield teacher_pb2.VocabularyChunk(first_id=0)
        raise RuntimeError("a secret of the server")

    async def Score(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            for position in range(request.start):
                yield teacher_pb2.ScoreChunk(first_position=position)
                await asyncio.sleep(0.05)
            return

    async def PushWeights(self, request_iterator: Any, context: Any) -> Any:
        raise Overloaded("another push is under way")


def register(server: grpc.aio.Server) -> str:
    teacher_pb2_grpc.add_TeacherServicer_to_server(StubTeacher(), server)
    return "distill.v1.Teacher"


def on_ready(port: int) -> None:
    print(f"listening on 127.0.0.1:{port}", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(register, ServerEndpoint(), grace_seconds=10, on_ready=on_ready))
