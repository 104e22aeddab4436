"""Asks the model hub whether it has a model, before a library retries for minutes."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

# The names that the hub's client accepts.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]{0,94}\w)?")
_TIMEOUT_SECONDS = 5.0
# A model that was downloaded has one of these in the cache of this machine.
_KNOWN_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def is_hub_id(name: str) -> bool:
    """Return whether a model's name is no existing path, and may be a hub id."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


@lru_cache
def find_on_hub(hub_id: str) -> bool:
    """Return whether the hub has the model; False if only the cache of this machine has it.

    Raises OSError if neither has it, or if the hub does not answer and the cache lacks it.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        HfApi().model_info(hub_id, timeout=_TIMEOUT_SECONDS)
    except Exception as error:  # errors of the network have many classes
        if any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in _KNOWN_FILES):
            return False
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"there is no directory {hub_id}, and the hub returns no such model: {reason}"
        ) from error
    return True
