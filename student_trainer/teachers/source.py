"""Where the teacher's rows come from. All sources answer the same question in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.data.batch import ScoredSequence
from student_trainer.data.sequence import TokenSequence
from student_trainer.rollouts.hf import Rollout


@dataclass(frozen=True)
class PendingRows:
    """A sequence whose rows are on their way."""

    sequence: TokenSequence
    rows: Future[RowBlock]

    @property
    def counts(self) -> float:
        """For how much, in the mean over a step: for its tokens."""
        return self.sequence.learned

    def wait(self) -> ScoredSequence:
        """Raises what the teacher raised; it gives up by itself, so this ends."""
        return ScoredSequence(self.sequence, self.sequence.learned_rows(self.rows.result()))


def resolved(rows: RowBlock) -> Future[RowBlock]:
    """Rows that are there."""
    future: Future[RowBlock] = Future()
    future.set_result(rows)
    return future


class TeacherSource(Protocol):
    """Scores completions: one row a token of `rollout.completion`."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """The rows of one rollout, when they are there; head ids are always filled in."""


class RemoteTeacher:
    """A teacher service behind gRPC; requests of many rollouts are in flight at once."""

    def __init__(
        self,
        client: TeacherClient,
        *,
        top_k: int | None,
        temperature: float,
        f32: bool,
    ) -> None:
        """`top_k`: of the teacher; None: score at the rollout's own head ids."""
        self._client = client
        self._top_k = top_k
        self._temperature = temperature
        self._f32 = f32

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        head = rollout.head_ids.numpy().astype(np.int32) if self._top_k is None else None
        query = ScoreQuery(
            token_ids=rollout.token_ids.numpy().astype(np.int32),
            start=rollout.start,
            top_k=self._top_k,
            head_ids=head,
            temperature=self._temperature,
            f32=self._f32,
        )
        return self._client.submit(query)


class TeachersByName:
    """Sends each rollout to the teacher that its prompt names."""

    def __init__(self, teachers: Mapping[str, TeacherSource]) -> None:
        self._teachers = teachers

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        return self._teachers[rollout.teacher].score(rollout)
