"""A key-value cache in bfloat16."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

# The argument of `model.generate` that takes a cache; transformers 5.24 renamed it.
_STEP = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _STEP else "past_key_values"


class NarrowCache(DynamicCache):  # type: ignore[misc]
    """A key-value cache in bfloat16, the dtype in which attention reads it under autocast.

    With float32 weights, the keys after rotary embedding are float32. The default cache of
    transformers then stores keys and values in float32 and casts all of them for every token. The
    results are equal.
    """

    def update(self, key: Tensor, value: Tensor, *layer: Any, **options: Any) -> Any:
        """Add new keys and values of a layer, and return all keys and values of this layer.

        See `DynamicCache`.
        """
        return super().update(key.to(torch.bfloat16), value.to(torch.bfloat16), *layer, **options)


def make_cache(model: Any, *, bf16: bool) -> NarrowCache | None:
    """Return an empty cache for `model.generate`, or None if `generate` must create the cache.

    Returns None for models with recurrent states, such as Mamba, and for students in float32.
    """
    if not bf16 or not model._supports_default_dynamic_cache():
        return None
    return NarrowCache(config=model.config.get_text_config(decoder=True))
