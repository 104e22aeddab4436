"""The interface of a teacher source, and sequences that wait for their rows.

A teacher source returns rows for a rollout: a teacher service (`remote.py`), the anchor
(`anchor.py`), several teachers by name (`TeachersByName`), or none (`NoTeacher`).
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
    """A sequence whose rows may not have arrived. `wait` returns a ScoredSequence."""

    sequence: TokenSequence
    rows: Future[RowBlock]

    @property
    def counts(self) -> float:
        """Weight of the sequence in the mean loss of a step: its number of learned tokens."""
        return self.sequence.learned

    def wait(self) -> ScoredSequence:
        """Wait for the rows, and return the sequence with the rows of its learned tokens.

        Raises the error of the teacher source. The wait is limited by the time limit of the source.
        """
        return ScoredSequence(self.sequence, self.sequence.learned_rows(self.rows.result()))


def resolved(value: Value) -> Future[Value]:
    """Return a future that already has `value` as its result."""
    future: Future[Value] = Future()
    future.set_result(value)
    return future


class TeacherSource(Protocol):
    """A source of rows for a rollout, one row per token of `rollout.completion`."""

    @property
    def any_time(self) -> bool:
        """Whether any thread may call `score`, even before the step that uses the rollout."""

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows of one rollout. The block of the future always has head ids.

        The future resolves when the service answers, or in the next `finish`.
        """

    def finish(self) -> None:
        """Collective. Compute the rows for which `score` only stored the rollouts.

        Call this once per step, after the last `score`. A remote teacher does nothing here.
        """


class TeachersByName:
    """A TeacherSource that sends each rollout to the teacher that its prompt names."""

    def __init__(self, teachers: Mapping[str, TeacherSource]) -> None:
        self._teachers = teachers

    @property
    def any_time(self) -> bool:
        """Whether any thread may call `score` of every teacher at any time."""
        return all(teacher.any_time for teacher in self._teachers.values())

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Request the rows from the teacher `rollout.teacher`."""
        return self._teachers[rollout.teacher].score(rollout)

    def finish(self) -> None:
        """Collective. Finish every teacher."""
        for teacher in self._teachers.values():
            teacher.finish()


class NoTeacher:
    """The TeacherSource of a job with neither teacher nor anchor: placeholder rows."""

    any_time = True

    def score(self, rollout: Rollout) -> Future[RowBlock]:
        """Return rows with the rollout's head ids and zero log-probs; no loss reads them."""
        return resolved(placeholder_rows(rollout.head_ids.numpy()))

    def finish(self) -> None:
        """Do nothing: the futures of `score` are already resolved."""
