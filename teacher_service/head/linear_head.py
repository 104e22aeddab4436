"""Finds the tensors of a model's head, and how it makes logits, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from teacher_service.head.scale_and_cap import PLAIN, ScaleAndCap, is_linear, probe_head
from teacher_service.head.stored_head import StoredWeight, find_bias, find_weight
from teacher_service.models.loading import build_load_error, build_not_linear_error, find_body

_PROBE_TOKENS = 8
_PROBE_VOCABULARY = 32


@dataclass(frozen=True)
class HeadTensors:
    """Names of the tensors of the head's weight and bias in the files of a model.

    - vocab_size: number of rows of the weight.
    - scale_and_cap: how the products of the head become logits.
    """

    weight: StoredWeight
    bias: str | None
    vocab_size: int
    scale_and_cap: ScaleAndCap = PLAIN


def find_head(model: Any, path: Path) -> HeadTensors:
    """Return the names of the head's tensors; `model` was loaded from `path` to device "meta".

    Replaces the head of `model` and the forward method of its body. Raises InvalidInput if the
    logits are not one linear layer of the hidden states (scaled or capped), if the weight files do
    not contain the head under a parameter name of the model, or if the quantisation of the head is
    unknown.
    """
    head = model.get_output_embeddings()
    if not is_linear(head):
        raise build_not_linear_error(path)
    tensors = HeadTensors(
        weight=find_weight(path, _list_names(model, head.weight)),
        bias=None if head.bias is None else find_bias(path, _list_names(model, head.bias)),
        vocab_size=len(head.weight),
    )
    return replace(tensors, scale_and_cap=_probe_scale_and_cap(model, path))


def _list_names(model: Any, parameter: Tensor) -> list[str]:
    """Return the names of `parameter`; a tied head also has the names of the embedding."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [name for name, candidate in parameters if candidate is parameter]


class _BodyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """The output of a model's body with only the hidden states; every other field is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _probe_scale_and_cap(model: Any, path: Path) -> ScaleAndCap:
    """Return how `model` scales and caps the products of its head.

    Runs the model's own code after its body on fixed hidden states, with a small random head in
    place of the real head. Modifies `model`. Raises InvalidInput if the logits are anything else.
    """
    original_head = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(
        original_head.in_features, _PROBE_VOCABULARY, bias=original_head.bias is not None
    )
    states = torch.randn(1, _PROBE_TOKENS, original_head.in_features, generator=generator)
    find_body(model).forward = lambda *_, **__: _BodyOutput(last_hidden_state=states)
    model.set_output_embeddings(head)
    try:
        scale_and_cap = probe_head(model)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise build_load_error(path, f"its head cannot be checked: {error}") from error
    if scale_and_cap is None:
        raise build_not_linear_error(path)
    return scale_and_cap
