"""LongRoPE (Ding et al., arXiv 2402.13753): position encodings that depend on the sequence length.

A model such as Phi-3.5 or Phi-4-mini has two sets of rotary factors. transformers takes the set of
a whole batch from its longest sequence, vLLM from the longest sequence that it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_switch(config: Any) -> int | None:
    """Return the largest number of tokens for which a model uses its short rotary factors.

    Longer sequences have the long factors. `config`: the configuration of the text model, of
    transformers. Returns None if the length changes nothing: the model has no LongRoPE, or its two
    sets are equal.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_parameters = [value for value in parameters.values() if isinstance(value, Mapping)]
    switches = [
        int(rope["original_max_position_embeddings"])
        for rope in layer_parameters or [parameters]
        if rope.get("rope_type") == "longrope" and _has_two_sets(rope)
    ]
    return min(switches, default=None)


def _has_two_sets(rope: Mapping[str, Any]) -> bool:
    return any(
        rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in ("factor", "mscale")
    )
