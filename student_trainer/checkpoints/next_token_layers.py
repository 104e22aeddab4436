"""Next-token layers: layers for multi-token prediction (MTP), which transformers does not load.

Inference servers use these layers for speculative decoding. They load the layers if config.json
contains their number, and fail if the files then lack the layers. Training does not change the
layers: the export copies them from the student's directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# Entries of config.json that count the layers.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_MTP_NAME = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class NextTokenLayers:
    """The MTP layers of a model: their tensors, and their number in config.json."""

    def __init__(
        self, source: Path | None, config: Path, layers: int, own_names: Collection[str]
    ) -> None:
        """Find the MTP layers.

        - source: the directory of the original model; None: there are no tensors to copy.
        - config: config.json of the model directory that is being written.
        - layers: the number of the model's other layers.
        - own_names: the names, in the written files, of the weights that transformers loads.
        """
        self._config_file = config
        self._config = json.loads(config.read_text("utf-8"))
        self._text_configs = (self._config, self._config.get("text_config") or {})
        self._counts = {
            name: part[name] for part in self._text_configs for name in _COUNTS if part.get(name)
        }
        self._files: dict[str, Path] = {}
        for file in sorted(source.glob("*.safetensors")) if source and self._counts else ():
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if _is_next_token(name, layers) and name not in own_names:
                        self._files[name] = file
        self._exist = bool(self._files) or any(_is_next_token(name, layers) for name in own_names)

    def sizes(self) -> dict[str, Tensor]:
        """Return the tensors to copy, by name, as tensors without data."""
        sizes = {}
        for name, file in self._files.items():
            with safe_open(file, "pt") as tensors:
                view = tensors.get_slice(name)
                sizes[name] = torch.empty(view.get_shape(), dtype=view[:0].dtype, device="meta")
        return sizes

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each tensor to copy, unchanged and one at a time."""
        for name, file in self._files.items():
            with safe_open(file, "pt") as tensors:
                yield name, tensors.get_tensor(name)

    def correct_count(self) -> str:
        """Set the number of MTP layers in config.json to 0 if the model has no MTP layers.

        Returns a message for the user if config.json was changed, otherwise "".
        """
        if not self._counts or self._exist:
            return ""
        for part in self._text_configs:
            part.update(dict.fromkeys(part.keys() & self._counts.keys(), 0))
        text = json.dumps(self._config, indent=2, sort_keys=True) + "\n"
        self._config_file.write_text(text, "utf-8")
        counts = " and ".join(f"{name} = {count}" for name, count in self._counts.items())
        return f"the export has no layers for {counts}: it is 0"


def _is_next_token(name: str, layers: int) -> bool:
    number = _LAYER_NUMBER.search(name)
    is_later = number is not None and int(number[1]) >= layers
    return is_later or _MTP_NAME.search(name) is not None
