"""Probes, which run a model on a few tokens to find out a property of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clients.data.images import ImageReader, plain_image
from clients.data.models.scale_and_cap import PROBE, fit_scale_and_cap
from student_trainer.data.images import tensors_of
from student_trainer.losses import LogitMap

_PROBE_TOKENS = 8


class LineStates(Protocol):
    """The part of `Student` (`student.py`) that a probe uses."""

    model: Any

    def line_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, H] of lines [B, T]."""


@contextmanager
def called_linear_modules(model: Any) -> Iterator[set[nn.Module]]:
    """Context that records which nn.Linear modules are called by the forward passes inside it.

    Yields the set of these modules. The set lacks modules whose weight is read without a call. It
    also lacks the modules of experts, because a pass with other tokens may not call them.
    """
    called: set[nn.Module] = set()

    def record_call(module: nn.Module, *_: object) -> None:
        called.add(module)

    linear_modules = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and "expert" not in name
    ]
    handles = [module.register_forward_hook(record_call) for module in linear_modules]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def body_of(model: Any) -> Any:
    """Return the part of a causal language model that computes the last hidden states."""
    body = model.get_decoder()
    # Llama 4 names a part that its text model lacks; transformers then returns the model itself.
    return model.model if body is model else body


@torch.no_grad()
def find_logit_map(model: Any, vocab_size: int | None = None) -> LogitMap | None:
    """Return the map from products to logits; None if a LogitMap cannot describe the model.

    The products are the output of the head. A LogitMap describes a model whose head is one linear
    layer, and which only scales the states before the head, and scales and caps the products.

    `vocab_size`: the vocabulary size of the returned map.

    The probe replaces the products by known values, because real products may be too small to show
    a cap. The largest known values exceed any cap.
    """
    head = model.get_output_embeddings()
    # A subclass may do more than multiply by its weight: Dory's head has a factor for each id.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    head_inputs: list[Tensor] = []
    probe_values = np.resize(PROBE, (1, _PROBE_TOKENS, head.out_features))
    probe_products = torch.from_numpy(probe_values).to(model.device)

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        # float32 also for a bfloat16 model, so that the scale and the cap are not rounded.
        return probe_products.clone()  # some models scale it in place

    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % head.out_features
    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        states = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    except (AttributeError, TypeError):  # `get_decoder` returned something other than a decoder
        return None
    finally:
        handle.remove()
    if not head_inputs or logits.shape != probe_products.shape:
        return None  # the model does not call its head
    input_scale = _find_ratio(head_inputs[0], states)
    if input_scale is None or (input_scale != 1 and head.bias is not None):
        return None
    scale_and_cap = fit_scale_and_cap(probe_values, logits.float().cpu().numpy())
    if scale_and_cap is None:
        return None
    scale, cap = scale_and_cap
    return LogitMap(vocab_size, input_scale * scale, cap)


@torch.no_grad()
def uses_images(model: Any, reader: ImageReader) -> bool:
    """Return whether the images of a prompt change the last hidden states of the model.

    The probe passes the images in the same way as the trainer. Returns False for a model that needs
    other image inputs, and for a model that ignores images.
    """
    last_states = []
    for grey in (0, 255):
        pixels = reader.read([plain_image(grey)])
        ids = torch.zeros(1, pixels.tokens[0] + 2, dtype=torch.long)
        ids[0, 1:-1] = reader.placeholder
        inputs = {"input_ids": ids, **tensors_of([pixels], ids, reader.placeholder)}
        try:
            device_inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            hidden = model.base_model(**device_inputs, use_cache=False).last_hidden_state
        except Exception:  # noqa: BLE001 (a model may raise anything)
            return False
        last_states.append(hidden[0, -1])
    return not torch.equal(*last_states)


def _find_ratio(scaled: Tensor, states: Tensor) -> float | None:
    """Return the positive number r with `scaled` = r * `states`; None if there is none."""
    if torch.equal(scaled, states):
        return 1.0
    if scaled.shape != states.shape:
        return None
    scaled_values, state_values = scaled.double(), states.double()
    ratio = float((scaled_values * state_values).sum() / state_values.square().sum())
    tolerance = 1e-5 if scaled.dtype == torch.float32 else 1e-2
    is_close = bool(
        (scaled_values - ratio * state_values).norm() <= tolerance * scaled_values.norm()
    )
    return ratio if is_close and ratio > 0 else None


@torch.no_grad()
def separates_packed_sequences(student: LineStates, *, lines: int = 2) -> bool:
    """Return whether the sequences of a line do not influence each other.

    The sequences of a line are separated only by their position ids, which start again at 0. The
    probe changes the tokens of the first sequence. The hidden states of the second sequence must
    stay bit-identical, and must be close to its states without the first sequence. Returns False
    for a model that does not accept position ids.

    `lines`: the number of lines in the probe's batch. All lines are equal. Some kernels use another
    implementation for a single line.
    """
    length, vocab_size = 6, student.model.get_input_embeddings().num_embeddings
    device = student.model.device
    ids = torch.arange(2 * length, device=device) % vocab_size
    positions = torch.arange(length, device=device).repeat(2)

    def states(tokens: Tensor) -> Tensor:
        own_positions = positions[: len(tokens)]
        batch = tokens.repeat(lines, 1), own_positions.repeat(lines, 1)
        return student.line_states(*batch)[-1].float()

    try:
        packed_states = states(ids)
        changed_states = states(torch.cat([(ids[:length] + 1) % vocab_size, ids[length:]]))
        single_states = states(ids[length:])
    except (AttributeError, TypeError, ValueError):
        return False
    second_states = packed_states[length:]
    tolerance = 2e-2 * single_states.norm()  # the accuracy of bfloat16
    is_close = (second_states - single_states).norm() <= tolerance
    return torch.equal(second_states, changed_states[length:]) and bool(is_close)
