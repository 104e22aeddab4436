"""Recompute activations in the backward pass instead of keeping them (activation checkpointing).

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). The selective
policy is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), which stores the outputs of matrix products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

_ATEN = torch.ops.aten
# Expensive operators, whose outputs the selective policy stores. Flash attention of the package
# flash-attn and the grouped products of experts are other operators, and are recomputed.
PRODUCTS = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


def recompute_activations(model: Any, policy: bool | int | str) -> None:
    """Let the layers of a transformers model recompute their activations, in place.

    `policy`: the job's `student.gradient_checkpointing`. True: every layer recomputes all of them.
    n >= 2: every n-th layer does. "selective": every layer keeps the outputs of matrix products and
    of attention, and recomputes the rest. Gradients are the same with every policy.
    """
    if policy is False:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
    # The newer name of the method; the older one warns if both exist.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options)
    if policy is not True and isinstance(policy, int):
        layers = (
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        )
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % policy == 0
