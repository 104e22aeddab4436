"""Where the teacher's rows come from. All sources answer the same question in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from protos.rows.codec import RowBlock
from student_trainer.data.batch import ScoredSequence
from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence


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
        """The rows of one rollout, with head ids; resolved after the next `finish` at the latest,
        or when a remote teacher answers.
        """

    def finish(self) -> None:
        """Collective, once per step after its last `score`. Computes what `score` only collected;
        a remote teacher, which answers by itself, has nothing to do here.
        """


class TeachersByName:
    """Sends each rollout to the teacher that its prompt names."""

    def __init__(self, teachers: Mapping[str, TeacherSource]) -> None:
        self._teachers = teachers

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        return self._teachers[rollout.teacher].score(rollout)

    def finish(self) -> None:
        for teacher in self._teachers.values():
            teacher.finish()
