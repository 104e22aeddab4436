"""Probes: find properties of a model by running it on a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clients.data.images import ImageReader, plain_image
from clients.data.scale_and_cap import PROBE, fit_scale_and_cap
from student_trainer.data.images import tensors_of
from student_trainer.losses import LogitMap

_PROBE_TOKENS = 8


class LineStates(Protocol):
    """A student; see `Student` (`student.py`)."""

    model: Any

    def line_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the last hidden states [B, T, H] of lines [B, T]."""


@contextmanager
def called_linear_modules(model: Any) -> Iterator[set[nn.Module]]:
    """Yield a set, to which each nn.Linear is added that a forward pass inside the context calls.

    A module whose weight is read without a call is not in it, nor is one of an expert, which other
    tokens may leave out.
    """
    called: set[nn.Module] = set()

    def note(module: nn.Module, *_: object) -> None:
        called.add(module)

    linear = [
        one
        for name, one in model.named_modules()
        if type(one) is nn.Linear and "expert" not in name
    ]
    handles = [one.register_forward_hook(note) for one in linear]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def body_of(model: Any) -> Any:
    """Return the module of a causal LM that gives its last hidden states."""
    body = model.get_decoder()
    # Llama 4 names a part that its text model does not have, and transformers returns the whole.
    return model.model if body is model else body


@torch.no_grad()
def logit_map_of(model: Any, vocab_size: int | None = None) -> LogitMap | None:
    """Return how the model makes its logits from the products of its head and its last states.

    `vocab_size`: of the result. None if the head is not one linear layer, or if the model does
    anything else than scale and cap its products, or scale its states.

    The probe puts values in place of the output of the layer: a comparison of real logits would
    miss a cap that only affects large ones.
    """
    head = model.get_output_embeddings()
    # A subclass may do more than multiply with its weight: that of Dory has a factor for each id.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    seen: list[Tensor] = []
    values = np.resize(PROBE, (1, _PROBE_TOKENS, head.out_features))
    products = torch.from_numpy(values).to(model.device)

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        # float32 also for a bfloat16 model, so that what follows is not rounded.
        return products.clone()  # some models scale it in place

    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % head.out_features
    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        states = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    except (AttributeError, TypeError):  # what it calls its decoder is none
        return None
    finally:
        handle.remove()
    if not seen or logits.shape != products.shape:
        return None  # the model does not call its head
    scaled = _ratio_of(seen[0], states)
    if scaled is None or (scaled != 1 and head.bias is not None):
        return None
    found = fit_scale_and_cap(values, logits.float().cpu().numpy())
    if found is None:
        return None
    scale, cap = found
    return LogitMap(vocab_size, scaled * scale, cap)


@torch.no_grad()
def sees(model: Any, reader: ImageReader) -> bool:
    """Return True if images change the last hidden states of `model`, given as the trainer does.

    A model may need other inputs, or ignore those that it is given.
    """
    states = []
    for grey in (0, 255):
        pixels = reader.read([plain_image(grey)])
        ids = torch.zeros(1, pixels.tokens[0] + 2, dtype=torch.long)
        ids[0, 1:-1] = reader.placeholder
        inputs = {"input_ids": ids, **tensors_of([pixels], ids, reader.placeholder)}
        try:
            on_device = {name: of.to(model.device) for name, of in inputs.items()}
            made = model.base_model(**on_device, use_cache=False).last_hidden_state
        except Exception:  # a model raises anything for inputs that it does not know
            return False
        states.append(made[0, -1])
    return not torch.equal(*states)


def _ratio_of(scaled: Tensor, states: Tensor) -> float | None:
    """Return the number > 0 that makes `states` equal to `scaled`; None if there is none."""
    if torch.equal(scaled, states):
        return 1.0
    if scaled.shape != states.shape:
        return None
    one, other = scaled.double(), states.double()
    ratio = float((one * other).sum() / other.square().sum())
    tolerance = 1e-5 if scaled.dtype == torch.float32 else 1e-2
    near = bool((one - ratio * other).norm() <= tolerance * one.norm())
    return ratio if near and ratio > 0 else None


@torch.no_grad()
def separates_packed_sequences(student: LineStates, *, lines: int = 2) -> bool:
    """Return True if packed sequences do not influence each other.

    Packed sequences share a line, and only their position ids, which restart at 0, separate them.
    `lines`: of the batch, each with the same sequences; some kernels take another path for one.

    When the tokens of the first sequence change, no bit of the second one's hidden states may
    change, and they must be close to those of the second sequence alone. Returns False for a model
    that does not accept position ids.
    """
    length, width = 6, student.model.get_input_embeddings().num_embeddings
    device = student.model.device
    ids = torch.arange(2 * length, device=device) % width
    positions = torch.arange(length, device=device).repeat(2)

    def states(tokens: Tensor) -> Tensor:
        of_tokens = positions[: len(tokens)]
        return student.line_states(tokens.repeat(lines, 1), of_tokens.repeat(lines, 1))[-1].float()

    try:
        together = states(ids)
        changed = states(torch.cat([(ids[:length] + 1) % width, ids[length:]]))
        alone = states(ids[length:])
    except (AttributeError, TypeError, ValueError):
        return False
    second = together[length:]
    near = (second - alone).norm() <= 2e-2 * alone.norm()  # the accuracy of bfloat16
    return torch.equal(second, changed[length:]) and bool(near)
