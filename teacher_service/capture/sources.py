"""Row sources of a capture: an engine in this process, or a teacher service."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clients.config.capture import CaptureJob
from clients.data.images import read_same_image, read_stored_images
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, answer_bytes
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows.codec import RowBlock, compress_rows, encode_rows
from teacher_service.capture.plan import CapturePlan
from teacher_service.capture.sequences import CaptureSequence
from teacher_service.engines.base import ContinuousEngine, ScoringEngine

# Called with the number of rows of each sequence as soon as it is scored.
OnScored = Callable[[int], None]


@dataclass(frozen=True)
class QuerySettings:
    """The settings that all queries of a capture share, and the format of the stored rows."""

    top_k: int
    temperature: float
    f32: bool
    compress: bool
    tail_samples: int
    seed: int
    vocab_size: int | None = None  # number of first ids that rows cover; None: all ids
    folder: Path = Path()  # the folder of the data; paths of images are relative to it

    @classmethod
    def from_job(cls, job: CaptureJob) -> QuerySettings:
        """Return the settings of `job`.

        Raises InvalidInput if both teacher.top_k and method.tail_samples are 0.
        """
        if not job.teacher.top_k and not job.method.tail_samples:
            raise InvalidInput(
                "0 is allowed only with tail samples, otherwise rows would be empty",
                field="teacher.top_k",
                hint="set teacher.top_k or method.tail_samples above 0",
            )
        return cls(
            top_k=job.teacher.top_k,
            temperature=job.method.temperature,
            f32=job.teacher.logprob_format == "f32",
            compress=job.method.compress,
            tail_samples=job.method.tail_samples,
            seed=job.seed,
            folder=Path(job.data.path).parent,
        )

    def build_query(self, sequence: CaptureSequence) -> ScoreQuery:
        """Return the query for the rows of `sequence`. Raises Corrupt if an image has changed."""
        return ScoreQuery(
            *sequence.teacher_input,
            top_k=self.top_k,
            temperature=self.temperature,
            f32=self.f32,
            tail_samples=self.tail_samples,
            seed=self.seed,
            vocab_size=self.vocab_size,
            images=tuple(
                read_same_image(self.folder / name, digest)
                for name, digest in read_stored_images(sequence.images)
            ),
        )

    def encode(self, block: RowBlock) -> bytes:
        """Return the codec bytes of `block`, compressed if the job sets `method.compress`.

        Raises InvalidInput if the number of tail samples per row differs from the job's number.
        """
        if block.tail_samples != self.tail_samples:
            raise InvalidInput(
                "this teacher draws no tail samples",
                field="method.tail_samples",
                hint="set the key to 0, or use another engine",
            )
        data = encode_rows(block, f32=self.f32)
        return compress_rows(data) if self.compress else data

    @property
    def row_bytes(self) -> float:
        """Size of one encoded row in bytes, before compression."""
        samples = 2.25 * self.tail_samples + 4 if self.tail_samples else 0
        return self.top_k * (6.25 if self.f32 else 4.25) + 8 + samples


class RowSource(Protocol):
    """Anything that returns the rows of the files of a plan."""

    def files(self, numbers: range, on_scored: OnScored) -> Iterator[Sequence[RowBlock | bytes]]:
        """Yield the rows of each file in `numbers`, one entry per sequence, in order.

        An entry is bytes if the source encodes the rows itself. When a sequence is scored,
        `on_scored` is called with the number of its rows. Raises a DistillError. If the error
        concerns one sequence, its message names the sequence.
        """
        ...


class EngineSource:
    """A row source that scores with an engine in this process; see RowSource."""

    def __init__(
        self,
        engine: ScoringEngine,
        plan: CapturePlan,
        query_settings: QuerySettings,
        max_batch_tokens: int,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._query_settings = query_settings
        self._max_batch_tokens = max_batch_tokens

    def files(self, numbers: range, on_scored: OnScored) -> Iterator[Sequence[RowBlock]]:
        """Yield the rows of each file in `numbers`; see RowSource."""
        for number in numbers:
            indices = self._plan.file(number)
            sequences = [self._plan[index] for index in indices]
            max_batch_tokens = self._max_batch_tokens
            yield score_file(
                self._engine,
                self._query_settings,
                sequences,
                indices.start,
                max_batch_tokens,
                on_scored,
            )


class ServiceSource:
    """A row source that scores with a teacher service.

    The source sends further queries until the answers that it waits for have `prefetch_bytes`
    bytes.
    """

    def __init__(
        self,
        client: TeacherClient,
        plan: CapturePlan,
        query_settings: QuerySettings,
        prefetch_bytes: int,
    ) -> None:
        self._client = client
        self._prefetch_bytes = prefetch_bytes
        self._plan = plan
        self._query_settings = query_settings

    def files(self, numbers: range, on_scored: OnScored) -> Iterator[Sequence[RowBlock]]:
        """Yield the rows of each file in `numbers`; see RowSource."""
        pending_answers: deque[tuple[int, Future[RowBlock]]] = deque()
        # The bytes of rows that were requested and are not yielded yet, and of their images.
        requested_bytes = 0
        queries = (
            self._query_settings.build_query(self._plan[index])
            for number in numbers
            for index in self._plan.file(number)
        )
        for number in numbers:
            rows: list[RowBlock] = []
            for index in self._plan.file(number):
                while (not pending_answers or requested_bytes < self._prefetch_bytes) and (
                    query := next(queries, None)
                ):
                    # Images also wait in memory, until their rows arrive.
                    answer_size = answer_bytes(query) + sum(map(len, query.images))
                    pending_answers.append((answer_size, self._client.submit(query)))
                    requested_bytes += pending_answers[-1][0]
                answer_size, answer = pending_answers.popleft()
                try:
                    rows.append(answer.result())
                except (Corrupt, InvalidInput) as error:
                    raise _name_sequence(error, index) from error
                requested_bytes -= answer_size
                on_scored(len(rows[-1]))
            yield rows


def score_file(
    engine: ScoringEngine,
    query_settings: QuerySettings,
    sequences: Sequence[CaptureSequence],
    first: int,
    max_batch_tokens: int,
    on_scored: OnScored = lambda rows: None,
) -> list[RowBlock]:
    """Return the rows of the sequences of one file, in order.

    A batch never has sequences of two files, so the batches of a file do not depend on other files.
    An engine that batches by itself gets the whole file. `first` is the number of the first
    sequence, for error messages. `on_scored` is called with the number of rows of each sequence.
    Raises the error of the first sequence that fails.
    """
    rows: dict[int, RowBlock] = {}
    single_batch = [[*range(len(sequences))]]
    lengths = [len(sequence.teacher_input[0]) for sequence in sequences]
    is_continuous = isinstance(engine, ContinuousEngine)
    for batch in single_batch if is_continuous else batches(lengths, max_batch_tokens):
        answers = engine.score([query_settings.build_query(sequences[index]) for index in batch])
        for index, answer in zip(batch, answers, strict=True):
            if isinstance(answer, DistillError):
                raise _name_sequence(answer, first + index)
            rows[index] = answer
            on_scored(len(answer))
    return [rows[index] for index in range(len(sequences))]


def batches(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices into `lengths`, the longest sequences first.

    A batch holds at most `max_batch_tokens` tokens, padding included; a longer sequence forms a
    batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _name_sequence(error: DistillError, index: int) -> DistillError:
    """Return the same error with the number of the sequence in its message."""
    return type(error)(
        f"sequence {index} of the data: {error.message}", field=error.field, hint=error.hint
    )
