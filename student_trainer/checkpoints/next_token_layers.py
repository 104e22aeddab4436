"""Layers for multi-token prediction (MTP), which transformers ignores.

Inference servers load these layers for speculative decoding if config.json counts them, and fail if
the files lack them. The layers are not trained, but copied from the student's directory.
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
    """The tensors of the MTP layers in the directory of a model."""

    def __init__(
        self, source: Path | None, config: Path, layers: int, own_names: Collection[str]
    ) -> None:
        """`source`: the directory, or None. `config`: config.json of the model directory that is
        written. `layers`: number of its other layers. `own_names`: names in its files of the
        weights that transformers loads.
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

    def correct_count(self) -> str:
        """Set the layer count in config.json to 0 if there are no layers; return a note, or ""."""
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
