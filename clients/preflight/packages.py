"""Check that the packages which a job's program imports are installed on this machine.

Nothing is imported: the check reads the metadata of installed distributions.
"""

from __future__ import annotations

from clients.config.capture import CaptureJob
from clients.config.common import TrainingJob
from clients.config.kinds import AnyJob
from clients.config.reward import GENERATED
from clients.config.rl import RLJob
from protos.extras import require_extra


def check_packages(config: AnyJob) -> None:
    """Raises InvalidInput for the first package that is missing, with the command to install it."""
    if isinstance(config, CaptureJob):
        require_extra("teacher", "a capture", field="method.type")
        if config.method.ray is not None:
            require_extra("ray", "a capture on Ray", field="method.ray")
    if isinstance(config, TrainingJob):
        require_extra("train", "training", field="method.type")
    if isinstance(config, RLJob):
        _check_reward(config)


def _check_reward(config: RLJob) -> None:
    if config.reward is not None and config.reward.type == "math":
        require_extra("rl", "the reward math", field="reward.type")
    if config.reward is not None and config.reward.type.startswith(GENERATED):
        require_extra("gym", f"the reward {config.reward.type}", field="reward.type")
    if config.environment is not None:
        require_extra("rl", "the search environment", field="environment.type")
