"""Is a model's head one linear layer? Asked without the model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from teacher_service.models.files import weight_files
from teacher_service.models.loading import not_linear, not_loaded

_TOKENS = 8
_VOCABULARY = 32
# Large enough for the caps of real models to bend it.
_SPREAD = 100.0


@dataclass(frozen=True)
class HeadTensors:
    """Where the head is in the weight files: names of tensors, and its vocabulary."""

    weight: str
    bias: str | None
    vocab_size: int


def find_head(model: Any, path: Path) -> HeadTensors:
    """The head of `model`, loaded from `path` to the device "meta". Raises InvalidInput when it is
    not one linear layer, or not in the files under the model's own names.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise not_linear(path)
    tensors = HeadTensors(
        weight=_stored_name(model, head.weight, path),
        bias=None if head.bias is None else _stored_name(model, head.bias, path),
        vocab_size=len(head.weight),
    )
    _require_linear(model, path)
    return tensors


def _stored_name(model: Any, parameter: Tensor, path: Path) -> str:
    """A tied head is saved under the name of the embedding."""
    parameters = model.named_parameters(remove_duplicate=False)
    names: list[str] = [name for name, candidate in parameters if candidate is parameter]
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
        for name in names:
            if name in stored:
                return name
    raise not_loaded(path, f"its weight files have no tensor {' or '.join(names)}")


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """What a body returns; of the rest that bodies return (router logits, ...), nothing."""

    def __getattr__(self, name: str) -> None:
        return None


def _require_linear(model: Any, path: Path) -> None:
    """Run the model's own code from the hidden states on, with a small random head in the place of
    the real one. Changes `model`.
    """
    old = model.get_output_embeddings()
    random = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(old.in_features, _VOCABULARY, bias=old.bias is not None)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    states = torch.randn(1, _TOKENS, old.in_features, generator=random)
    states *= _SPREAD / old.in_features**0.5
    model.base_model.forward = lambda *_, **__: _States(last_hidden_state=states)
    model.set_output_embeddings(head)
    ids = torch.arange(_TOKENS)[None]
    try:
        with torch.inference_mode():
            ours, theirs = head(states), model(input_ids=ids, use_cache=False).logits
            same = ours.shape == theirs.shape and torch.allclose(ours, theirs, 1e-4, 1e-4)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise not_loaded(path, f"its head cannot be checked: {error}") from error
    if not same:
        raise not_linear(path)
