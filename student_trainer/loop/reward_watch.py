"""A warning for rewards without a learning signal: all groups of answers have equal rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from clients.config.rl import RLJob
from clients.config.tables.common import TrainingJob

log = logging.getLogger(__name__)

_STEPS = 5  # one step may be chance: with few prompts, all of them easy or hard
_FLAT = "reward/flat_groups"


class RewardWatch:
    """Logs one warning if all groups of several consecutive steps have equal rewards.

    The advantages of such a step are 0, and so is its policy gradient. Its forward and backward
    passes still run, to measure the entropy, the ratio and the KLs.
    """

    def __init__(self) -> None:
        self._flat_since: int | None = None
        self._last_flat_step = 0
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check reward/flat_groups of `step`."""
        if metrics.get(_FLAT) != 1.0:
            self._flat_since = None
            return
        self._last_flat_step = step
        if self._flat_since is None:
            self._flat_since = step
        if step - self._flat_since + 1 >= _STEPS and not self._warned:
            self._warned = True
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
        if self._flat_since is None or self._last_flat_step - self._flat_since + 1 < _STEPS:
            return ""
        return f"all rewards equal since step {self._flat_since}"


def learns_from_groups(config: TrainingJob) -> bool:
    """Return whether the advantages come from groups of rewards; a critic needs no differences."""
    if not isinstance(config, RLJob) or config.reward is None:
        return False
    return config.method.reward_weight > 0 and config.method.advantages != "gae"
