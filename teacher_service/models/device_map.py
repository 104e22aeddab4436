"""A model that is divided over the GPUs and the memory of one machine (`--device-map auto`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protos.extras import require_extra
from protos.program.logs import fields

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

OPTION = "--device-map"
# The only value of the option, named as in transformers.
DEVICE_MAP = "auto"

# Bytes that the model may use on each device, by GPU number or "cpu"; the rest is on disk.
Memory = Mapping[int | str, int]


def free_memory(share: float) -> Memory:
    """Return the free bytes times `share`, for each GPU and for the memory of this machine.

    Raises InvalidInput if accelerate is not installed.
    """
    require_extra("train", OPTION, field=OPTION, only=["accelerate"])
    from accelerate.utils import get_max_memory

    return {place: int(share * size) for place, size in get_max_memory().items()}


def load_head_weights(head: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the head of a model, in memory even if its layer is offloaded."""
    if not head.weight.is_meta:
        return head.weight.detach(), None if head.bias is None else head.bias.detach()
    from accelerate.utils import align_module_device

    with align_module_device(head):
        bias = None if head.bias is None else head.bias.detach().clone()
        return head.weight.detach().clone(), bias


def log_placement(model: Any) -> None:
    """Log the number of parts of a divided model on each device."""
    part_counts = Counter(str(place) for place in getattr(model, "hf_device_map", {}).values())
    if not part_counts:
        log.info("one device holds the model")
        return
    log.info("the model is divided", extra=fields(**{f"on {k}": n for k, n in part_counts.items()}))
