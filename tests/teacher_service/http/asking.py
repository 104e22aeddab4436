"""A client of the HTTP front that is no part of it: the standard library's."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, parse_settings
from tests.teacher_service.processes import TeacherProcess

VOCAB = 97
MODEL = f"vocab={VOCAB},max_length=64"
FAKE = ("--engine", "fake", "--model", MODEL, "--http-port", "0", "--max-top-k", "40")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """The HTTP port of a teacher process."""

    def __init__(self, teacher: TeacherProcess) -> None:
        self.teacher = teacher
        assert teacher.process.stdout
        line = teacher.process.stdout.readline()
        assert line.startswith("HTTP on http"), teacher.log.read_text()
        self.url = line.split()[-1]
        self.port = urlsplit(self.url).port or 0

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """GET, or POST a body: JSON, or the bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            request_headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(
                method or ("GET" if body is None else "POST"), path, data, request_headers
            )
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def scored_tokens(self) -> int:
        text = self.ask("/metrics").body.decode()
        name = "distill_teacher_scored_tokens_total "
        (line,) = (metric_line for metric_line in text.splitlines() if metric_line.startswith(name))
        return int(float(line.removeprefix(name)))


def tokens(length: int, seed: int = 0) -> list[int]:
    token_ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return token_ids


def distributions(token_ids: list[int]) -> NDArray[np.float64]:
    """Log-probs [T - 1, V] of all ids at each position after the first, from another engine."""
    query = ScoreQuery(np.array(token_ids, np.int32), 1, top_k=VOCAB, f32=True)
    (block,) = FakeEngine(parse_settings(MODEL)).score([query])
    assert isinstance(block, RowBlock)
    assert block.head_ids is not None
    logprobs = np.empty((len(block), VOCAB))
    np.put_along_axis(logprobs, block.head_ids, block.head_logprobs, axis=1)
    return logprobs
