"""LongRoPE (Ding et al., arXiv 2402.13753): position encodings that depend on the sequence length.

A model such as Phi-3.5 or Phi-4-mini has two sets of rotary factors. transformers selects the set
of a batch by its longest sequence; vLLM by the longest sequence that it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_switch(config: Any) -> int | None:
    """Return the largest number of tokens for which a model uses its short rotary factors.

    Longer sequences use the long factors. `config`: the transformers configuration of the text
    model. Returns None if the length has no effect: the model has no LongRoPE, or its two sets are
    equal.
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
