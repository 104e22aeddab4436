"""The seam between the trainer and the way by which weights reach its rollout engines.

`file_channel.py` is the only channel; engines open what it writes with `snapshot.py`. Every channel
keeps these promises, which tests/student_trainer/rollout_service/test_weight_channel.py checks:

- An engine samples an order with the verified weights of the order's version, or fails it.
- Trainers that share engines never wait for each other, whatever the order and the names in which
  they list the engines.
- A trainer that is stopped or killed at any point of `publish` delays no other trainer.
- An engine that was restarted, or has moved to another machine, gets every version that an order
  may still name.
"""

from __future__ import annotations

from typing import Protocol

from student_trainer.rollout_client.order import WeightsVersion


class WeightChannel(Protocol):
    """Gives versions of the student's weights to the engines. Every process of a job has one."""

    @property
    def newest(self) -> WeightsVersion:
        """The version that was published last; at least one must be published."""

    def publish(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Collective. Make the current weights available as version `number`; return it.

        A version that exists is not published again. `anchor`: the student currently has the
        weights of the anchor; their versions are a separate lineage. Raises Unavailable on all
        ranks if the weights cannot be published.
        """

    def delete_before(self, number: int) -> None:
        """Delete the versions before `number`: no order names them any more."""

    def close(self) -> None:
        """Delete all versions. Not collective."""
