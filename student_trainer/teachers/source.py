"""The interface of a teacher source, and sequences whose rows are still pending.

A teacher source returns teacher rows for rollouts. It is a teacher service (`remote.py`), the
anchor (`anchor.py`), several teachers by name (`TeachersByName`), or a placeholder (`NoTeacher`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from protos.rows.codec import RowBlock
from student_trainer.data.batch import ScoredSequence, placeholder_rows
from student_trainer.data.sequence import Rollout, TokenSequence

Value = TypeVar("Value")


@dataclass(frozen=True)
class PendingRows:
    """A sequence, and the future of its teacher rows."""

    sequence: TokenSequence
    rows: Future[RowBlock]

    @property
    def counts(self) -> float:
        """The weight of the sequence in the mean loss of a step: its number of learned tokens."""
        return self.sequence.learned

    def wait(self) -> ScoredSequence:
        """Wait for the rows. Return the sequence with the rows of its learned tokens.

        Raises the error of the teacher source, which also limits the time of the wait.
        """
        return ScoredSequence(self.sequence, self.sequence.learned_rows(self.rows.result()))


def resolved(value: Value) -> Future[Value]:
    """Return a future that already has `value` as its result."""
    future: Future[Value] = Future()
    future.set_result(value)
    return future


class TeacherSource(Protocol):
    """A source of teacher rows for rollouts: one row per token of `rollout.completion`."""

    @property
    def any_time(self) -> bool:
        """Whether any thread may call `score`, also before the step that uses the rollout."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows of one rollout.

        The result of the future always has head ids. The future gets its result when the service
        answers, or in the next call of `finish`.
        """

    def finish(self) -> None:
        """Collective. Compute the rows of the rollouts that `score` has only stored.

        Call this once per step, after the last `score`. For a remote teacher, this does nothing.
        """


class TeachersByName:
    """A TeacherSource that passes each rollout to the teacher that the rollout's prompt names."""

    def __init__(self, teachers: Mapping[str, TeacherSource]) -> None:
        self._teachers = teachers

    @property
    def any_time(self) -> bool:
        """Whether `any_time` is true for every teacher."""
        return all(teacher.any_time for teacher in self._teachers.values())

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows from the teacher with the name `rollout.teacher`."""
        return self._teachers[rollout.teacher].score(rollout)

    def finish(self) -> None:
        """Collective. Call `finish` of every teacher."""
        for teacher in self._teachers.values():
            teacher.finish()


class NoTeacher:
    """The TeacherSource of a job with neither teacher nor anchor. It returns placeholder rows."""

    any_time = True

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Return rows with the rollout's head ids and log-probs of zero.

        No loss reads these rows.
        """
        return resolved(placeholder_rows(rollout.head_ids.numpy()))

    def finish(self) -> None:
        """Do nothing: the futures of `score` already have their results."""
