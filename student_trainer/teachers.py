"""Where the teacher's rows come from. All sources answer the same question in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clients.config import TeacherConfig
from clients.score_query import ScoreQuery
from clients.teacher_client import TeacherClient
from protos.rows import RowBlock
from student_trainer.batches import ScoredRollout
from student_trainer.rollouts import Rollout


@dataclass(frozen=True)
class PendingRows:
    """A rollout whose rows are on their way."""

    rollout: Rollout
    rows: Future[RowBlock]

    def wait(self) -> ScoredRollout:
        """Raises what the teacher raised; it gives up by itself, so this ends."""
        return ScoredRollout(self.rollout, self.rows.result())


class TeacherSource(Protocol):
    """Scores completions: one row a token of `rollout.completion`."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """The rows of one rollout, when they are there; head ids are always filled in."""


class RemoteTeacher:
    """A teacher service behind gRPC; requests of many rollouts are in flight at once."""

    def __init__(
        self,
        client: TeacherClient,
        config: TeacherConfig,
        *,
        student_head: bool,
        temperature: float,
    ) -> None:
        """`student_head`: score at the rollout's own head ids, not at the teacher's top-k."""
        self._client = client
        self._config = config
        self._student_head = student_head
        self._temperature = temperature

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        head = rollout.head_ids.numpy().astype(np.int32) if self._student_head else None
        query = ScoreQuery(
            token_ids=rollout.token_ids.numpy().astype(np.int32),
            start=rollout.start,
            top_k=None if self._student_head else self._config.top_k,
            head_ids=head,
            temperature=self._temperature,
            f32=self._config.logprob_format == "f32",
        )
        return self._client.submit(query)


class TeachersByName:
    """Sends each rollout to the teacher that its prompt names."""

    def __init__(self, teachers: Mapping[str, TeacherSource]) -> None:
        self._teachers = teachers

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        return self._teachers[rollout.teacher].score(rollout)
