"""Tensor parallelism: a group of processes divides the linear modules of each layer.

The method is from Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3. A module that reads
the residual stream is divided by outputs (`colwise`): each process has some heads of attention, and
some units of the MLP. The next module, which reads these outputs, is divided by inputs (`rowwise`),
and its products are summed over the group. Attention and MLP therefore need one all-reduce each in
the forward pass, and one in the backward pass.

The plan that transformers has for the model (`model.tp_plan`) defines how each module is divided.
Modules outside the layers (embeddings and head) are never divided. Every process of a group
computes the embeddings, the head and the norms of a layer in full.
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
from clients.preflight.parallel import TENSOR_FIELD as FIELD
from clients.preflight.parallel import divided_counts, refuse_indivisible
from protos.errors import InvalidInput
from student_trainer.model.loading import load_config


def _norm_of_heads() -> ParallelStyle:
    """Return the parallel style of a norm that a layer applies to each attention head.

    The states [B, T, heads, width] are divided by heads. All heads share the weight of the norm, so
    its gradient is summed over the group.
    """
    return SequenceParallel(sequence_dim=2, use_local_output=True)


# The styles by the names that transformers gives them.
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": _norm_of_heads,
}
_NORMS = "replicated_with_grad_allreduce"


def check_divisible(student: StudentConfig, size: int) -> None:
    """Check that a group of `size` processes can divide the student. Loads no weights.

    Raises InvalidInput (`train.tensor_parallel`) if it cannot.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(student))
    counts = divided_counts(model.config.get_text_config().to_dict())
    for module, style in parallel_styles(model).items():
        if isinstance(module, nn.Linear):
            is_colwise = isinstance(style, ColwiseParallel)
            feature_count = module.out_features if is_colwise else module.in_features
            counts[f"{'outputs' if is_colwise else 'inputs'} of a linear module"] = feature_count
            refuse_indivisible(counts, size, FIELD)


def parallel_styles(model: Any) -> dict[nn.Module, ParallelStyle]:
    """Return the parallel style of each module of the layers that is divided.

    Raises InvalidInput (`train.tensor_parallel`) if transformers has no plan for the model. Also
    raises it if the plan divides other modules than linear modules and norms of heads. Examples are
    the experts of a mixture, and several projections in one matrix.
    """
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(module)
    styles: dict[nn.Module, ParallelStyle] = {}
    for pattern, style in (model.tp_plan or {}).items():
        matching_modules = modules.get(pattern, [])
        if "*" not in pattern or not matching_modules:
            continue  # outside the layers, or only in a variant of the model
        if style not in _STYLES or not all(
            style == _NORMS or type(module) is nn.Linear for module in matching_modules
        ):
            raise _build_error(model, f"{pattern} is {style!r} in its plan, which is not supported")
        styles |= {module: _STYLES[style]() for module in matching_modules}
    if not any(isinstance(style, RowwiseParallel) for style in styles.values()):
        raise _build_error(model, "transformers has no plan for it")
    return styles


def divide(layer: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the modules of a layer over the processes of `mesh`, in place.

    Each process already has the full weights, and keeps its part of them. There is no
    communication.
    """
    for module in list(layer.modules()):
        if module in styles:
            parallelize_module(module, mesh, styles[module], src_data_rank=None)
            if isinstance(styles[module], RowwiseParallel):
                module.register_forward_hook(_copy_output)


def _copy_output(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Return a copy of a module's output. A forward hook.

    Without the copy, the output is a view. FSDP2 registers its backward hook on the output, and an
    in-place operation on a view would drop this hook.
    """
    return output.clone()


def _build_error(model: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"{type(model).__name__} cannot be divided over processes: {why}",
        field=FIELD,
        hint='remove the key, and shard with train.sharding = "fsdp2" alone',
    )
