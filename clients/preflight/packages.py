"""Checks that the packages of a job's program are installed, without importing them.

The checks read the metadata of installed distributions.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import urllib.parse
from collections.abc import Mapping
from importlib.util import find_spec

from clients.config.tables.common import StudentConfig, TrackConfig
from clients.config.tables.job import JobConfig
from clients.config.tables.reward import GENERATED, RewardConfig
from clients.data.images import require_pillow
from protos.errors import InvalidInput
from protos.extras import install_command, require_extra

# Modules of flash-attn 2 and 3, and of the package that downloads kernels, as transformers reads.
_FLASH_MODULES = ("flash_attn", "flash_attn_interface", "kernels")


def check_packages(config: JobConfig) -> None:
    """Raise InvalidInput if a package that the job's program needs is not installed.

    The hint is the command that installs the package.
    """
    for extra, user, field in config.extras:
        require_extra(extra, user, field=field)
    # Some builds of vLLM have another distribution name than the extra requires.
    lacks_vllm = find_spec("vllm") is None
    engine, teacher, student = config.rollout_engine, config.started_teacher, config.trained_student
    if engine is not None and engine.engine == "vllm" and engine.replicas and lacks_vllm:
        require_extra("vllm", "the engine vllm", field="rollouts.engine")
    if teacher is not None:
        require_extra("teacher", "a teacher", field="teacher.model")
        if teacher.engine == "vllm" and lacks_vllm:
            require_extra("vllm", "the engine vllm", field="teacher.engine")
    if student is not None:
        check_attention(student)
        if config.prompt_format is not None and config.prompt_format.image_column is not None:
            require_pillow("data.image_column")
    check_reward(config.reward_table)


def check_attention(student: StudentConfig) -> None:
    """Raise InvalidInput if `student.attention` is "flash" and no installed package provides it."""
    if student.attention == "flash" and not any(map(find_spec, _FLASH_MODULES)):
        raise InvalidInput(
            "the attention 'flash' needs the package flash-attn, which is not installed",
            field="student.attention",
            hint="remove the key, or install flash-attn on a machine with a GPU",
        )


def check_reward(reward: RewardConfig | None) -> None:
    """Raise InvalidInput if a package that `reward` needs is not installed."""
    if reward is not None and reward.type == "math":
        require_extra("rl", "the reward math", field="reward.type", only={"math-verify"})
    if reward is not None and reward.type.startswith(GENERATED):
        require_extra("gym", f"the reward {reward.type}", field="reward.type")


_WANDB_URL = "https://api.wandb.ai"


def check_trackers(track: TrackConfig) -> None:
    """Raise InvalidInput if a tracker is not installed, or if W&B has no API key.

    Does not import a tracker.
    """
    for name in ("wandb", "trackio"):
        if getattr(track, name) is not None and importlib.util.find_spec(name) is None:
            raise InvalidInput(
                f"{name} is not installed",
                field=f"track.{name}",
                hint=f"{install_command('track')}, or remove the table",
            )
    if track.wandb is not None and not _has_wandb_credentials(os.environ):
        raise InvalidInput(
            "there is no API key for Weights & Biases",
            field="track.wandb",
            hint="set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline",
        )


def _has_wandb_credentials(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(environment.get("WANDB_BASE_URL", _WANDB_URL)).netloc
    try:
        return netrc.netrc(environment.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
