"""Probes: find properties of a model by running it on a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Return True if the logits are exactly a linear layer of the last hidden states.

    False if the model caps or scales its logits. The probe replaces the output of the layer by
    large numbers, which must come out unchanged: a comparison of logits would miss a cap that only
    affects large ones.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    seen: list[Tensor] = []
    # Rounded to bfloat16, so that a bfloat16 model does not change them.
    probe = torch.linspace(-200, 200, head.out_features, device=model.device).bfloat16().float()

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(inputs[0])
        return probe.to(output.dtype).expand_as(output)

    ids = torch.arange(4, device=model.device)[None] % head.out_features
    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    except AttributeError:
        return False
    finally:
        handle.remove()
    return torch.equal(logits.float(), probe.expand_as(logits)) and torch.equal(seen[0], states)


@torch.no_grad()
def separates_packed_sequences(model: Any, *, lines: int = 2) -> bool:
    """Return True if packed sequences do not influence each other.

    Packed sequences share a line, and only their position ids, which restart at 0, separate them.
    `lines`: of the batch, each with the same sequences; some kernels take another path for one.

    When the tokens of the first sequence change, no bit of the second one's hidden states may
    change, and they must be close to those of the second sequence alone. Returns False for a model
    that does not accept position ids.
    """
    length, width = 6, model.get_input_embeddings().num_embeddings
    ids = torch.arange(2 * length, device=model.device) % width
    positions = torch.arange(length, device=model.device).repeat(2)

    def states(tokens: Tensor) -> Tensor:
        inputs = {
            "input_ids": tokens.repeat(lines, 1),
            "position_ids": positions[: len(tokens)].repeat(lines, 1),
        }
        found: Tensor = body(**inputs, use_cache=False).last_hidden_state[-1]
        return found.float()

    try:
        body = model.get_decoder()
        together = states(ids)
        changed = states(torch.cat([(ids[:length] + 1) % width, ids[length:]]))
        alone = states(ids[length:])
    except (AttributeError, TypeError, ValueError):
        return False
    second = together[length:]
    near = (second - alone).norm() <= 2e-2 * alone.norm()  # the accuracy of bfloat16
    return torch.equal(second, changed[length:]) and bool(near)
