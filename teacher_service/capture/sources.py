"""Where a capture's rows come from: an engine of its own, or a teacher service."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from clients.config.capture import CaptureJob
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, answer_bytes
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.codec import RowBlock, compress_rows, encode_rows
from teacher_service.capture.plan import Plan
from teacher_service.capture.sequences import TokenSequence
from teacher_service.engines.base import Engine

# Hears of the rows of each sequence as they come.
Told = Callable[[int], None]


@dataclass(frozen=True)
class Ask:
    """What is asked about every sequence, and how its rows are kept."""

    top_k: int
    temperature: float
    f32: bool
    compress: bool
    tail_samples: int
    seed: int

    @classmethod
    def of(cls, job: CaptureJob) -> Ask:
        """Raises InvalidInput for rows with nothing in them."""
        if not job.teacher.top_k and not job.method.tail_samples:
            raise InvalidInput(
                "only rows with tail samples can do without a head",
                field="teacher.top_k",
                hint="give it, or method.tail_samples",
            )
        return cls(
            top_k=job.teacher.top_k,
            temperature=job.method.temperature,
            f32=job.teacher.logprob_format == "f32",
            compress=job.method.compress,
            tail_samples=job.method.tail_samples,
            seed=job.seed,
        )

    def query(self, sequence: TokenSequence) -> ScoreQuery:
        return ScoreQuery(
            sequence.token_ids,
            sequence.start,
            top_k=self.top_k,
            temperature=self.temperature,
            f32=self.f32,
            tail_samples=self.tail_samples,
            seed=self.seed,
        )

    def encode(self, block: RowBlock) -> bytes:
        """Raises InvalidInput for a teacher that did not draw what was asked for."""
        if block.tail_samples != self.tail_samples:
            raise InvalidInput(
                "this teacher draws no tail samples",
                field="method.tail_samples",
                hint="leave it at 0, or use another engine",
            )
        data = encode_rows(block, f32=self.f32)
        return compress_rows(data) if self.compress else data

    @property
    def row_bytes(self) -> float:
        """Of one encoded row, not compressed."""
        samples = 2.25 * self.tail_samples + 4 if self.tail_samples else 0
        return self.top_k * (6.25 if self.f32 else 4.25) + 8 + samples


class RowSource(Protocol):
    def files(self, numbers: range, told: Told) -> Iterator[Sequence[RowBlock | bytes]]:
        """The rows of each sequence of each of these files of the plan, in order; bytes where they
        come encoded. Raises DistillError, naming the sequence that it is about.
        """


class EngineSource:
    """An engine in this process."""

    def __init__(self, engine: Engine, plan: Plan, ask: Ask, max_batch_tokens: int) -> None:
        self._engine = engine
        self._plan = plan
        self._ask = ask
        self._max_batch_tokens = max_batch_tokens

    def files(self, numbers: range, told: Told) -> Iterator[Sequence[RowBlock]]:
        for number in numbers:
            indices = self._plan.file(number)
            sequences = [self._plan[index] for index in indices]
            most = self._max_batch_tokens
            yield score_file(self._engine, self._ask, sequences, indices.start, most, told)


class ServiceSource:
    """A teacher behind gRPC, asked for so many bytes of answers ahead."""

    def __init__(self, client: TeacherClient, plan: Plan, ask: Ask, ahead: int) -> None:
        self._client = client
        self._ahead = ahead
        self._plan = plan
        self._ask = ask

    def files(self, numbers: range, told: Told) -> Iterator[Sequence[RowBlock]]:
        asked: deque[tuple[int, Future[RowBlock]]] = deque()
        ahead = 0  # bytes of the answers that were asked for and not taken
        queries = (self._query(index) for number in numbers for index in self._plan.file(number))
        for number in numbers:
            rows: list[RowBlock] = []
            for index in self._plan.file(number):
                while (not asked or ahead < self._ahead) and (query := next(queries, None)):
                    asked.append((answer_bytes(query), self._client.submit(query)))
                    ahead += asked[-1][0]
                size, answer = asked.popleft()
                try:
                    rows.append(answer.result())
                except (Corrupt, InvalidInput) as error:
                    raise _about(error, index) from error
                ahead -= size
                told(len(rows[-1]))
            yield rows

    def _query(self, index: int) -> ScoreQuery:
        return self._ask.query(self._plan[index])


def score_file(
    engine: Engine,
    ask: Ask,
    sequences: Sequence[TokenSequence],
    first: int,
    max_batch_tokens: int,
    told: Told = lambda rows: None,
) -> list[RowBlock]:
    """The rows of the sequences of one file, the first of which has the number `first`. A batch is
    made of sequences of one file: the same ones whatever was scored before.
    """
    rows: dict[int, RowBlock] = {}
    for batch in batches([len(sequence.token_ids) for sequence in sequences], max_batch_tokens):
        answers = engine.score([ask.query(sequences[index]) for index in batch])
        for index, answer in zip(batch, answers, strict=True):
            if isinstance(answer, DistillError):
                raise _about(answer, first + index)
            rows[index] = answer
            told(len(answer))
    return [rows[index] for index in range(len(sequences))]


def batches(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Which sequences go through the model together: the longest first, as many as fit padded."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _about(error: DistillError, index: int) -> DistillError:
    """The same fault with the sequence in its message."""
    return type(error)(
        f"sequence {index} of the data: {error.message}", field=error.field, hint=error.hint
    )
