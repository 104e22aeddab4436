"""A warning for rewards that cannot teach: every group of answers has equal rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from clients.config.rl import RLJob
from clients.config.tables.common import TrainingJob

log = logging.getLogger(__name__)

_STEPS = 5  # one step may be chance: with few prompts, all of them easy or hard
_FLAT = "reward/flat_groups"


class RewardWatch:
    """Logs one warning if no group of several steps in a row has two different rewards.

    The advantages of such a step are 0, and so is its policy gradient. Its forward and backward
    passes are made all the same: they measure the entropy, the ratio and the KLs.
    """

    def __init__(self) -> None:
        self._since: int | None = None
        self._last = 0
        self._told = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check reward/flat_groups of `step`."""
        if metrics.get(_FLAT) != 1.0:
            self._since = None
            return
        self._last = step
        if self._since is None:
            self._since = step
        if step - self._since + 1 >= _STEPS and not self._told:
            self._told = True
            log.warning(
                "step %d: for %d steps, all answers to each prompt have had equal rewards, so the "
                "policy gradient is zero: check the reward on the samples, choose prompts that the "
                "student sometimes gets right, or raise method.rollouts_per_prompt",
                step,
                _STEPS,
            )

    @property
    def note(self) -> str:
        """The state in a few words, for the phase of the job; "" if there is nothing to say."""
        if self._since is None or self._last - self._since + 1 < _STEPS:
            return ""
        return f"all rewards equal since step {self._since}"


def learns_from_groups(config: TrainingJob) -> bool:
    """Return whether the advantages come from groups of rewards; a critic needs no differences."""
    if not isinstance(config, RLJob) or config.reward is None:
        return False
    return config.method.reward_weight > 0 and config.method.advantages != "gae"
