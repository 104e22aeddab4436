"""A teacher service as a source of rows."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.data.rollout import Rollout


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

    def finish(self) -> None:
        """Nothing to do: the service answers each rollout by itself."""
