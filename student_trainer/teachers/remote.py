"""A teacher service as a source of teacher rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.data.sequence import Rollout
from student_trainer.teachers.teacher_input import TeacherInput


class RemoteTeacher:
    """The TeacherSource that requests rows from a teacher service over gRPC.

    Many requests are in flight at the same time.
    """

    any_time = True

    def __init__(
        self,
        client: TeacherClient,
        *,
        top_k: int | None,
        temperature: float,
        f32: bool,
        tail_samples: int = 0,
        vocab_size: int | None = None,
        teacher_input: TeacherInput | None = None,
    ) -> None:
        """Store the settings of the requests.

        - top_k: request rows at the `top_k` most likely ids of the teacher; None: at the head ids
          of the rollouts.
        - temperature: divides the teacher's logits.
        - f32: whether the service sends log-probs as float32; otherwise it sends float16.
        - tail_samples: the number of ids per row that the teacher samples from its tail; needs
          `top_k`.
        - vocab_size: compute the softmax over the first `vocab_size` logits of the teacher; None:
          over all logits.
        - teacher_input: converts a rollout to the input of the teacher; None: the teacher reads the
          ids of the student.
        """
        self._client = client
        self._top_k = top_k
        self._temperature = temperature
        self._f32 = f32
        self._tail_samples = tail_samples
        self._vocab_size = vocab_size
        self._teacher_input = teacher_input or TeacherInput()

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request one row per token of the completion, without waiting for the rows.

        Raises InvalidInput if the rollout is too large for one message, and Corrupt if the file of
        an image has changed. The future raises the error of the service, or Unavailable if the
        service does not answer within `teacher.patience_seconds`.
        """
        view = self._teacher_input
        token_ids, start = view.tokens(rollout)
        images: tuple[bytes, ...] = ()
        if rollout.images is not None:
            token_ids, start = rollout.images.collapse(token_ids, start)
            images = rollout.images.load_encoded()
        query = ScoreQuery(
            token_ids=token_ids,
            start=start,
            top_k=self._top_k,
            head_ids=view.to_teacher_ids(rollout.head_ids) if self._top_k is None else None,
            temperature=self._temperature,
            f32=self._f32,
            tail_samples=self._tail_samples,
            # A repeated request gets the same samples; another rollout of the prompt gets other
            # samples.
            seed=zlib.crc32(rollout.token_ids.numpy().tobytes()) if self._tail_samples else 0,
            draw_ids=None if rollout.draws is None else view.to_teacher_ids(rollout.draws.ids),
            vocab_size=self._vocab_size,
            images=images,
        )
        rows = self._client.submit(query)
        return rows if view.ids is None else map_future(rows, view.to_student_rows)

    def finish(self) -> None:
        """Do nothing: `score` has already sent the requests."""


def map_future(rows: Future[RowBlock], change: Callable[[RowBlock], RowBlock]) -> Future[RowBlock]:
    """Return a future whose result is `change` of the result of `rows`.

    The future raises the error of `rows` or of `change`.
    """
    mapped: Future[RowBlock] = Future()

    def set_mapped(completed: Future[RowBlock]) -> None:
        try:
            mapped.set_result(change(completed.result()))
        except BaseException as error:  # noqa: BLE001 (the future raises it, also a cancellation)
            mapped.set_exception(error)

    rows.add_done_callback(set_mapped)
    return mapped
