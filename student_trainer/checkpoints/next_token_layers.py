"""Layers for multi-token prediction (MTP), which transformers ignores.

Inference servers load these layers for speculative decoding if config.json counts them, and fail if
the files lack them. The layers are not trained, but copied from the student's directory.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

log = logging.getLogger(__name__)

# Entries of config.json that count the layers.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_MTP_NAME = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class NextTokenLayers:
    """The tensors of the MTP layers in the directory of a model."""

    def __init__(self, source: Path | None, config: Any, own_names: Collection[str]) -> None:
        """`source`: the directory, or None. `config`: of the model. `own_names`: names in the files
        of the weights that transformers loads.
        """
        text_config = config.get_text_config()
        self._is_counted = any(getattr(text_config, name, None) for name in _COUNTS)
        self._files: dict[str, Path] = {}
        for file in sorted(source.glob("*.safetensors")) if source and self._is_counted else ():
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if _is_next_token(name, text_config) and name not in own_names:
                        self._files[name] = file
        self._exist = bool(self._files) or any(
            _is_next_token(name, text_config) for name in own_names
        )

    def sizes(self) -> dict[str, Tensor]:
        """Return the tensors by name, without data."""
        sizes = {}
        for name, file in self._files.items():
            with safe_open(file, "pt") as tensors:
                view = tensors.get_slice(name)
                sizes[name] = torch.empty(view.get_shape(), dtype=view[:0].dtype, device="meta")
        return sizes

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they are in the files, one at a time, with their names."""
        for name, file in self._files.items():
            with safe_open(file, "pt") as tensors:
                yield name, tensors.get_tensor(name)

    def correct_count(self, file: Path) -> None:
        """Set the layer count in a config.json to 0 if there are no such layers, with a warning."""
        if not self._is_counted or self._exist:
            return
        config = json.loads(file.read_text("utf-8"))
        for part in (config, config.get("text_config", {})):
            for name in part.keys() & set(_COUNTS):
                log.warning("the export has no layers for %s = %s: it is 0", name, part[name])
                part[name] = 0
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _is_next_token(name: str, text_config: Any) -> bool:
    number = _LAYER_NUMBER.search(name)
    layers = getattr(text_config, "num_hidden_layers", math.inf)  # Blt has several stacks
    is_later = number is not None and int(number[1]) >= layers
    return is_later or _MTP_NAME.search(name) is not None
