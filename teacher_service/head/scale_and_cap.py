"""From the products of a head to logits: a scale and a soft cap, found by a probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.data.models.scale_and_cap import PROBE, fit_scale_and_cap
from teacher_service.models.loading import find_body

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class ScaleAndCap:
    """How a product z of the head becomes a logit: scale z, or cap tanh(scale z / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, products: Tensor, temperature: float) -> Tensor:
        """Replace float32 `products` by the logits divided by `temperature`, and return them."""
        if self.cap is not None:
            capped = products.div_(self.cap / self.scale).tanh_()
            return capped.mul_(self.cap / temperature)
        divisor = temperature / self.scale
        return products if divisor == 1 else products.div_(divisor)


PLAIN = ScaleAndCap()


def is_linear(head: Any) -> bool:
    """Return True if the head computes only the product with its weight, plus its bias.

    A subclass may compute more: Dory multiplies by a factor for each id.
    """
    return isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward


@torch.inference_mode()
def probe_head(
    model: Any, *, device: torch.device | None = None, max_tokens: int = _PROBE_TOKENS
) -> ScaleAndCap | None:
    """Return the scale and the cap that `model` applies to the products of its head.

    Runs the model on up to `max_tokens` tokens, with chosen values in place of the output of its
    head, because real logits can be too small to show a cap. Returns None if the model does
    anything except scaling and capping products, or scaling hidden states. `device` is the device
    of the token ids, if it differs from the device of the head.
    """
    head = model.get_output_embeddings()
    count = min(_PROBE_TOKENS, max_tokens)
    values = np.resize(PROBE, (1, count, head.out_features))
    products = torch.from_numpy(values)
    head_inputs: list[Tensor] = []

    def replace_output(_: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        # Use float32 also for a model in half precision, so that scaling and capping do not round.
        return products.to(output.device, copy=True)  # some models scale the products in place

    ids = (torch.arange(count, device=device or head.weight.device) * 7 % head.out_features)[None]
    handle = head.register_forward_hook(replace_output)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    if not head_inputs or logits.shape != products.shape:
        return None  # the model does not call its head
    states = find_body(model)(input_ids=ids, use_cache=False).last_hidden_state
    state_scale = _fit_ratio(head_inputs[0], states)
    if state_scale is None or (state_scale != 1 and head.bias is not None):
        return None
    fit = fit_scale_and_cap(values, logits.float().cpu().numpy())
    return None if fit is None else ScaleAndCap(state_scale * fit[0], fit[1])


def _fit_ratio(scaled: Tensor, states: Tensor) -> float | None:
    """Return the number > 0 that makes `states` equal to `scaled`; None if there is none.

    NaN is equal to NaN here: scoring reports it for the sequences that it affects.
    """
    if scaled.shape != states.shape:
        return None
    tolerance = 1e-4 if scaled.dtype == torch.float32 else 2e-2
    if torch.allclose(scaled, states, rtol=tolerance, atol=tolerance, equal_nan=True):
        return 1.0
    scaled_values, state_values = scaled.double(), states.double()
    ratio = float((scaled_values * state_values).sum() / state_values.square().sum())
    is_close = bool(
        (scaled_values - ratio * state_values).norm() <= tolerance * scaled_values.norm()
    )
    return ratio if is_close and ratio > 0 else None
