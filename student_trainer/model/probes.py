"""Probes: what a model's forward pass does, found by running it on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Whether the logits are exactly a linear layer of the last hidden states: no cap, no scale.

    The layer's output is replaced by large numbers: they must come out as they are. A comparison
    of logits would miss a cap that only bites when they grow.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    seen: list[Tensor] = []
    # Numbers that bfloat16 has too.
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
def keeps_apart(model: Any) -> bool:
    """Whether sequences that share a line, told apart by positions that begin again, are read as if
    each was alone.

    Other tokens in the one must not change a bit of what comes out for the other.
    """
    length, width = 6, model.get_input_embeddings().num_embeddings
    ids = torch.arange(2 * length, device=model.device) % width
    positions = torch.arange(length, device=model.device).repeat(2)

    def states(tokens: Tensor) -> Tensor:
        # Two lines, as some kernels know one way for one of them and another for more.
        inputs = {
            "input_ids": tokens.repeat(2, 1),
            "position_ids": positions[: len(tokens)].repeat(2, 1),
        }
        found: Tensor = body(**inputs, use_cache=False).last_hidden_state[1]
        return found.float()

    try:
        body = model.get_decoder()
        together = states(ids)
        changed = states(torch.cat([(ids[:length] + 1) % width, ids[length:]]))
        alone = states(ids[length:])
    except (AttributeError, TypeError, ValueError):
        return False
    second = together[length:]
    near = (second - alone).norm() <= 2e-2 * alone.norm()  # bfloat16 is no closer
    return torch.equal(second, changed[length:]) and bool(near)
