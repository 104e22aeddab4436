"""Tensor parallelism: the linear modules of a layer, divided over a group of processes.

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3. A module that reads the residual stream
is divided by outputs (`colwise`): each process has some heads of attention, and some units of the
MLP. The module that reads those is divided by inputs (`rowwise`), and its products are added up
over the group. Attention and MLP thus need one sum each, in the forward and in the backward pass.

The plan of the model in transformers (`model.tp_plan`) says how each module is divided. What is
outside the layers, embeddings and head, is not divided, whatever the plan says; like the norms of
a layer, every process of a group computes it in full, from the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from clients.config.tables.common import StudentConfig
from clients.preflight.tensor_parallel import FIELD, divided_counts, refuse_indivisible
from protos.errors import InvalidInput
from student_trainer.model.loading import load_config


def _norm_of_heads() -> ParallelStyle:
    """Return the style of a norm of each head: states [B, T, heads, width], divided by heads.

    All heads have one weight, so its gradient is added up over the group.
    """
    return SequenceParallel(sequence_dim=2, use_local_output=True)


# By transformers' names.
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": _norm_of_heads,
}
_NORMS = "replicated_with_grad_allreduce"


def check_divisible(student: StudentConfig, size: int) -> None:
    """Check that a group of `size` processes can share the job's student; loads no weights.

    Raises InvalidInput (`train.tensor_parallel`).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(student))
    counts = divided_counts(model.config.get_text_config().to_dict())
    for module, style in parallel_styles(model).items():
        if isinstance(module, nn.Linear):
            outputs = isinstance(style, ColwiseParallel)
            divided = module.out_features if outputs else module.in_features
            counts[f"{'outputs' if outputs else 'inputs'} of a linear module"] = divided
            refuse_indivisible(counts, size, FIELD)


def parallel_styles(model: Any) -> dict[nn.Module, ParallelStyle]:
    """Return how the modules of the layers are divided, by module.

    Raises InvalidInput (`train.tensor_parallel`) if transformers has no plan for the model, or one
    that divides other things than linear modules and norms of heads: the experts of a mixture, or
    several projections in one matrix.
    """
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(module)
    styles: dict[nn.Module, ParallelStyle] = {}
    for pattern, style in (model.tp_plan or {}).items():
        found = modules.get(pattern, [])
        if "*" not in pattern or not found:  # outside the layers, or of a variant of the model
            continue
        if style not in _STYLES or not all(style == _NORMS or _is_linear(one) for one in found):
            raise _refused(model, f"{pattern} is {style!r} in its plan, which is not supported")
        styles |= {module: _STYLES[style]() for module in found}
    if not any(isinstance(style, RowwiseParallel) for style in styles.values()):
        raise _refused(model, "transformers has no plan for it")
    return styles


def divide(layer: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the modules of a layer over the processes of `mesh`, in place.

    Each process takes its part of the weights that it has; nothing is sent.
    """
    for module in list(layer.modules()):
        if module in styles:
            parallelize_module(module, mesh, styles[module], src_data_rank=None)
            if isinstance(styles[module], RowwiseParallel):
                module.register_forward_hook(_copied)


def _copied(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Return a copy of a view, as a forward hook.

    FSDP2 puts its hook for the backward pass on this output; an operation in place on a view would
    drop the hook.
    """
    return output.clone()


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _refused(model: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"{type(model).__name__} cannot be divided over processes: {why}",
        field=FIELD,
        hint='leave it out, and shard with train.sharding = "fsdp2" alone',
    )
