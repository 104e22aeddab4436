"""Checks that the trackers of a job can start: they are installed and have an API key if needed."""

from __future__ import annotations

import importlib.util
import netrc
import os
import urllib.parse
from collections.abc import Mapping

from clients.config.tables.common import TrackConfig
from protos.errors import InvalidInput
from protos.extras import install_command

_WANDB_URL = "https://api.wandb.ai"


def check_trackers(track: TrackConfig) -> None:
    """Raise InvalidInput if a tracker is not installed, or if W&B has no API key.

    Imports no tracker.
    """
    for name in ("wandb", "trackio"):
        if getattr(track, name) is not None and importlib.util.find_spec(name) is None:
            raise InvalidInput(
                f"{name} is not installed",
                field=f"track.{name}",
                hint=f"{install_command('track')}, or leave the table out",
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
