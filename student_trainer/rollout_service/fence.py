"""The fence between attempts of a job: a rollout service serves the newest attempt it has seen."""

from __future__ import annotations

from collections import OrderedDict

from protos.errors import WrongState
from student_trainer.rollout_client.order import WeightsVersion

# Number of jobs to remember; the job whose last order is the oldest is forgotten first.
_MAX_JOBS = 10_000


class Fence:
    """The newest attempt of each job that has sent an order. Kept in memory: lost at a restart."""

    def __init__(self, max_jobs: int = _MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._newest: OrderedDict[str, int] = OrderedDict()

    def admit(self, weights: WeightsVersion) -> WrongState | None:
        """Admit an order, and record its attempt.

        Returns the error for the orders of earlier attempts if the attempt is new. Raises that
        error if a later attempt has sent an order.
        """
        if not weights.job:
            return None
        newest = self._newest.get(weights.job, 0)
        if weights.attempt < newest:
            raise _replaced_error(newest)
        self._newest[weights.job] = weights.attempt
        self._newest.move_to_end(weights.job)
        if len(self._newest) > self._max_jobs:
            self._newest.popitem(last=False)
        return _replaced_error(weights.attempt) if weights.attempt > newest else None


def _replaced_error(newest: int) -> WrongState:
    return WrongState(
        f"attempt {newest} of this job has replaced the one that sent this order",
        field="rollouts.address",
        hint="this trainer ends; look at the newer attempt",
    )
