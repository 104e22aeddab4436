"""Tensor parallelism: a group of processes divides the linear modules of each layer.

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3. A module that reads the residual stream
is divided by outputs (`colwise`): each process has some heads of attention, and some units of the
MLP. The module that reads these outputs is divided by inputs (`rowwise`), and its products are
summed over the group. Attention and MLP thus need one all-reduce each, in the forward and in the
backward pass.

The model's plan in transformers (`model.tp_plan`) defines the division of each module. Modules
outside the layers (embeddings and head) are never divided. Every process of a group computes
embeddings, head and the norms of a layer in full.
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
    """Return the parallel style of a norm that is applied to each attention head.

    Its states [B, T, heads, width] are divided by heads. All heads share one weight, so its
    gradient is summed over the group.
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
    """Check that a group of `size` processes can divide the job's student. Loads no weights.

    Raises InvalidInput (`train.tensor_parallel`).
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
    """Return how the modules of the layers are divided, by module.

    Raises InvalidInput (`train.tensor_parallel`) if transformers has no plan for the model, or if
    the plan divides modules other than linear modules and norms of heads, such as the experts of a
    mixture, or several projections in one matrix.
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

    Each process keeps its part of the weights it already has, without communication.
    """
    for module in list(layer.modules()):
        if module in styles:
            parallelize_module(module, mesh, styles[module], src_data_rank=None)
            if isinstance(styles[module], RowwiseParallel):
                module.register_forward_hook(_copy_output)


def _copy_output(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Return a copy of the output. A forward hook.

    The output is a view. FSDP2 registers its backward hook on the output, and an in-place operation
    on a view would drop this hook.
    """
    return output.clone()


def _build_error(model: Any, why: str) -> InvalidInput:
    return InvalidInput(
        f"{type(model).__name__} cannot be divided over processes: {why}",
        field=FIELD,
        hint='remove the key, and shard with train.sharding = "fsdp2" alone',
    )
