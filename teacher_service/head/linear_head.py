"""Finds the tensors of a model's head, and how it makes logits, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from protos.errors import InvalidInput
from teacher_service.head.scale_and_cap import PLAIN, ScaleAndCap, probe_head
from teacher_service.models.files import weight_files
from teacher_service.models.loading import body_of, not_linear, not_loaded

_TOKENS = 8
_VOCABULARY = 32
_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class HeadTensors:
    """Names of the head's tensors in the weight files, the number of rows of its weight.

    scale_and_cap: how their products become logits.
    """

    weight: str
    bias: str | None
    vocab_size: int
    scale_and_cap: ScaleAndCap = PLAIN


def find_head(model: Any, path: Path) -> HeadTensors:
    """Return the names of the head's tensors; `model` was loaded from `path` to device "meta".

    Replaces the head of `model` and the forward method of its body. Raises InvalidInput if the
    logits are not one linear layer of the hidden states, scaled or capped, if the weight files do
    not contain the head under a parameter name of the model, or if they contain a quantised head.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise not_linear(path)
    tensors = HeadTensors(
        weight=_stored_name(model, head.weight, path),
        bias=None if head.bias is None else _stored_name(model, head.bias, path),
        vocab_size=len(head.weight),
    )
    require_plain_weight(path, [tensors.weight])
    return replace(tensors, scale_and_cap=_probe(model, path))


def _stored_name(model: Any, parameter: Tensor, path: Path) -> str:
    """Return the name under which `parameter` is stored: the embedding's name for a tied head."""
    parameters = model.named_parameters(remove_duplicate=False)
    names: list[str] = [name for name, candidate in parameters if candidate is parameter]
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
        for name in names:
            if name in stored:
                return name
    raise not_loaded(path, f"its weight files have no tensor {' or '.join(names)}")


def require_plain_weight(path: Path, names: Sequence[str]) -> None:
    """Raise InvalidInput if the head's weight, stored under one of `names`, is quantised.

    A quantised weight has another dtype, or scales in other tensors of the same layer. Its values
    alone are wrong, and no self-test would notice: it compares the rows with each other.
    """
    layers = {name.rpartition(".")[0] + "." for name in names}
    plain = {layer + field for layer in layers for field in ("weight", "bias")}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                if not name.startswith(tuple(layers)):
                    continue
                dtype = tensors.get_slice(name).get_dtype()
                if name not in plain or dtype not in _PLAIN_DTYPES:
                    raise InvalidInput(
                        f"the head of {path} is quantised: its weight files have {name} ({dtype})",
                        field="--model",
                        hint="give a checkpoint whose lm_head is not quantised",
                    )


class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """The output of a body; every other field (router logits, ...) is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _probe(model: Any, path: Path) -> ScaleAndCap:
    """Return how `model` scales and caps the products of its head.

    Runs the model's own code from given hidden states on, with a small random head in place of the
    real one. Modifies `model`. Raises InvalidInput if the logits are anything else.
    """
    old = model.get_output_embeddings()
    random = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(old.in_features, _VOCABULARY, bias=old.bias is not None)
    states = torch.randn(1, _TOKENS, old.in_features, generator=random)
    body_of(model).forward = lambda *_, **__: _States(last_hidden_state=states)
    model.set_output_embeddings(head)
    try:
        found = probe_head(model)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise not_loaded(path, f"its head cannot be checked: {error}") from error
    if found is None:
        raise not_linear(path)
    return found
