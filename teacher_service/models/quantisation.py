"""How the weights of a model are quantised, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clients.data.models.files import read_object


def quantisation_of(path: Path) -> Mapping[str, Any] | None:
    """Return the entry `quantization_config` of the model at `path`; None if it has none.

    A model of text and images may have the entry in its `text_config`. Raises InvalidInput if
    config.json is no JSON object.
    """
    config = read_object(path / "config.json", "--model")
    nested = config.get("text_config")
    quantisation = config.get("quantization_config")
    if quantisation is None and isinstance(nested, dict):
        quantisation = nested.get("quantization_config")
    return quantisation if isinstance(quantisation, dict) else None


def block_of(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a weight that share one scale; None if no block is given."""
    groups = quantisation.get("config_groups") or {}
    schemes = [group.get("weights") or {} for group in groups.values()]
    block_sizes = [quantisation.get("weight_block_size")]
    block_sizes += [scheme.get("block_structure") for scheme in schemes]
    blocks = {(int(block[0]), int(block[1])) for block in block_sizes if block and len(block) == 2}
    return blocks.pop() if len(blocks) == 1 else None
