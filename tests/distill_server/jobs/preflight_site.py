"""A server with the preflight check, a teacher for it, and the files of a job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from clients.jobs.job import JobState
from clients.teacher.query import tokenizer_fingerprint
from distill_server.jobs.control import JobControl
from distill_server.jobs.preflight import JobPreflight
from distill_server.runners.machine import Machine
from distill_server.scheduler import Policy
from protos import teacher_pb2, teacher_pb2_grpc
from protos.rpc.transport import CHANNEL_OPTIONS
from tests.distill_server.scripted_runner import SmallServer, small_server

TOKENS = ["<end>", *"0123456789+="]
VOCABULARY = len(TOKENS)
T = TypeVar("T")


class Teacher(teacher_pb2_grpc.TeacherServicer):
    """A teacher that answers GetInfo and GetVocabulary and counts the calls; it scores no rows."""

    def __init__(self) -> None:
        self.info_requests = 0
        self.vocabulary_requests = 0
        self.refuses = False
        self.max_tail_draws = 256
        self.vocab_size, self.takes_vocab_size = VOCABULARY, True

    def GetInfo(self, request: teacher_pb2.GetInfoRequest, context: Any) -> teacher_pb2.TeacherInfo:
        self.info_requests += 1
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token that it knows")
        return teacher_pb2.TeacherInfo(
            model="teacher",
            fingerprint="f",
            tokenizer_fingerprint=tokenizer_fingerprint(TOKENS),
            vocab_size=self.vocab_size,
            takes_vocab_size=self.takes_vocab_size,
            max_top_k=VOCABULARY,
            max_length=64,
            max_tail_samples=256,
            max_tail_draws=self.max_tail_draws,
            adapters=[teacher_pb2.TeacherAdapter(name="math", fingerprint="of math")],
        )

    def GetVocabulary(
        self, request: teacher_pb2.GetVocabularyRequest, context: Any
    ) -> Iterator[teacher_pb2.VocabularyChunk]:
        self.vocabulary_requests += 1
        yield teacher_pb2.VocabularyChunk(first_id=0, tokens=TOKENS)


@contextmanager
def serve_teacher(teacher: Teacher, port: int = 0) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
    teacher_pb2_grpc.add_TeacherServicer_to_server(teacher, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def write_student(
    path: Path,
    *,
    width: int = VOCABULARY,
    rows: int = 2,
    tokens: Sequence[str] = TOKENS,
    unigram: bool = False,
) -> Path:
    """Write a directory that looks like a model; its weights file has only a header."""
    path.mkdir()
    write_tokens(path, tokens, unigram=unigram)
    (path / "config.json").write_text(json.dumps({"vocab_size": width}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, 0]}})
    data = len(header).to_bytes(8, "little") + header.encode()
    (path / "model.safetensors").write_bytes(data)
    return path


def write_tokens(path: Path, tokens: Sequence[str], *, unigram: bool = False) -> None:
    """Write tokenizer.json; the first token is an added one, as end-of-text often is."""
    ids = {token: number for number, token in enumerate(tokens) if number and token}
    scores = [[token, 0.0] for token in ("<unk>", *tokens[1:])]
    added = [{"id": 0, "content": tokens[0], "special": True}]
    document = {"added_tokens": added, "model": {"vocab": scores if unigram else ids}}
    (path / "tokenizer.json").write_text(json.dumps(document))


def job(root: Path, address: object, **changes: Any) -> dict[str, Any]:
    """Return a valid job configuration, changed by `a__b=value` for a.b."""
    if not (root / "student").is_dir():
        write_student(root / "student")
        prompt = '{"prompt": "1+1=", "answer": "2", "teacher": "math"}\n'
        (root / "prompts.jsonl").write_text(prompt)
    values: dict[str, Any] = {
        "student": {"model": str(root / "student")},
        "teacher": {"address": address, "top_k": 4},
        "data": {"path": str(root / "prompts.jsonl")},
        "method": {"max_prompt_tokens": 16, "max_new_tokens": 6},
    }
    for name, value in changes.items():
        table, key = name.split("__")
        values.setdefault(table, {})[key] = value
    return values


class Site:
    """A server with the preflight check; it starts no job."""

    def __init__(self, server: SmallServer, loop: asyncio.Runner) -> None:
        self.store, self.runs = server.store, server.runs
        machine = Machine(cpus=256)
        self.control = JobControl(
            *(server.store, server.runs, lambda: None, machine), preflight=JobPreflight()
        )
        self._loop = loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)

    def submit(self, config: Mapping[str, Any], key: str = "") -> JobState:
        return self.run(self.control.submit_checked(json.dumps(config), "", key)).state


@contextmanager
def checking_site(root: Path) -> Iterator[Site]:
    with small_server(root / "runs", Policy()) as server, asyncio.Runner() as loop:
        yield Site(server, loop)
