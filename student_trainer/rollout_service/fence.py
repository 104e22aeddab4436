"""The fence between attempts of a job: a rollout service serves the newest one it has heard."""

from __future__ import annotations

from collections import OrderedDict

from protos.errors import WrongState
from student_trainer.rollout_client.order import WeightsVersion

# Jobs that are remembered; the one that was heard longest ago is forgotten first.
_MOST_JOBS = 10_000


class Fence:
    """The newest attempt of each job that has sent an order. In memory: a restart forgets it."""

    def __init__(self, most_jobs: int = _MOST_JOBS) -> None:
        self._most_jobs = most_jobs
        self._newest: OrderedDict[str, int] = OrderedDict()

    def hear(self, weights: WeightsVersion) -> WrongState | None:
        """Note the attempt of an order.

        Returns the error for the orders of earlier attempts if it is the first of this one. Raises
        that error if a later attempt has been heard.
        """
        if not weights.job:
            return None
        newest = self._newest.get(weights.job, 0)
        if weights.attempt < newest:
            raise _replaced(newest)
        self._newest[weights.job] = weights.attempt
        self._newest.move_to_end(weights.job)
        if len(self._newest) > self._most_jobs:
            self._newest.popitem(last=False)
        return _replaced(weights.attempt) if weights.attempt > newest else None


def _replaced(newest: int) -> WrongState:
    return WrongState(
        f"attempt {newest} of this job has replaced the one that sent this order",
        field="rollouts.address",
        hint="this trainer ends; look at the newer attempt",
    )
