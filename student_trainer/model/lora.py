"""Low-rank adapters (LoRA, arXiv 2106.09685): adds, saves, loads and merges them.

A layer with an adapter computes with the weight W + (alpha / rank) B A. W is frozen, and the
matrices A and B are trained. B starts at zero, so the training starts from the original model.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from clients.config.tables.common import StudentConfig
from protos.errors import InvalidInput
from student_trainer.model.probes import body_of

FILE, CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"
ADAPTER = "default"

log = logging.getLogger(__name__)


def add_adapters(model: Any, student: StudentConfig, *, with_images: bool = False) -> None:
    """Freeze the weights of a model, and add an adapter to each linear layer that affects the
    logits.

    The model is changed in place. It keeps its class, its decoder, its head and its `generate`. The
    adapters are float32. The head gets no adapter; with `student.lora.train_head`, the full weight
    of the head is trained.

    `with_images`: also add adapters to the vision part of the model.

    Raises InvalidInput (`student.lora`) if the model has no such layer. Also raises InvalidInput
    for a mixture of experts that stores the experts in one parameter, because `merge_adapters`
    cannot merge adapters of this parameter.
    """
    # These imports take half a second; only jobs with adapters need them.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer, ParamWrapper

    assert student.lora is not None
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=student.model,
        revision=student.revision,
        target_modules="all-linear",
        exclude_modules=_modules_without_adapters(model, with_images),
        r=student.lora.rank,
        lora_alpha=student.lora.alpha or 2 * student.lora.rank,
    )
    try:
        inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise InvalidInput(
            f"peft cannot add adapters to {student.model!r}: {error}",
            field="student.lora",
            hint="remove the table to train all weights",
        ) from error
    settings.exclude_modules = None  # the target modules are the modules with adapters
    settings.target_modules = {
        name for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise InvalidInput(
            "adapters do not work with a mixture of experts",
            field="student.lora",
            hint="remove the table to train all weights, or choose a dense student",
        )
    if student.lora.train_head:
        head = model.get_output_embeddings().requires_grad_(True)
        settings.modules_to_save = [
            name
            for name, module in model.named_modules()
            if getattr(module, "weight", None) is head.weight
        ]
        settings.ensure_weight_tying = len(settings.modules_to_save) > 1
    for parameter in trainable_weights(model).values():  # peft gives them the frozen dtype
        parameter.data = parameter.data.float()


def _modules_without_adapters(model: Any, with_images: bool) -> list[str] | None:
    """Return the names of the linear modules that get no adapter; None if there is no such module.

    A module gets no adapter in these cases:

    - The model does not call the module, or the logits do not depend on the module's output. The
      output of an indexer, which only selects keys, does not affect the logits in this sense.
    - The module is a subclass with another computation, such as a product in groups.
    - The module shares its weight with another module (Zamba): the export has this weight only
      once.
    - The module is in a state-space mixer (Mamba) and is not its input projection. If a fused
      kernel is installed, it reads the weights of the other modules directly.

    Experts get adapters even if the probe does not call them, because a model calls an expert only
    for some tokens.
    """
    text_modules = set(body_of(model).modules())
    names = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    uses = Counter(id(module.weight) for module in names)
    plain_modules = {module for module in names if uses[id(module.weight)] == 1}
    offsets: dict[nn.Module, Tensor] = {}

    def add_offset(
        module: Any, inputs: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> Any:
        hidden = next(iter((*inputs, *options.values())), None)
        if not _is_product(module, hidden, output):
            plain_modules.discard(module)
            return output
        zero = output.new_zeros(1).requires_grad_()
        return output + offsets.setdefault(module, zero)

    handles = [
        module.register_forward_hook(add_offset, with_kwargs=True) for module in plain_modules
    ]
    was_training = model.training
    model.train()  # in training, Gemma 3n reads weights that it calls in evaluation
    try:
        with torch.enable_grad():
            ids = torch.arange(4, device=model.device)[None]
            logits = model(input_ids=ids, use_cache=False).logits
            gradients = torch.autograd.grad(logits.sum(), [*offsets.values()], allow_unused=True)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    learning_modules = set(names) - text_modules if with_images else set()
    learning_modules |= {
        module for module, gradient in zip(offsets, gradients, strict=True) if gradient is not None
    }
    kernel_modules = {
        module
        for mixer in model.modules()
        if hasattr(mixer, "A_log") and hasattr(mixer, "D")
        for name, module in mixer.named_children()
        if name != "in_proj"
    }
    excluded_modules = {
        module: name
        for module, name in names.items()
        if module in kernel_modules
        or module not in plain_modules
        or (module not in learning_modules and "expert" not in name)
    }
    # The head and the vision part are no members of the text part: nobody expects adapters there.
    if layers := [name for module, name in excluded_modules.items() if module in text_modules]:
        log.info(
            "%d linear layers have no adapter, such as %s: it could not be trained or merged",
            len(layers),
            layers[0],
        )
    return [*excluded_modules.values()] or None


def _is_product(module: nn.Linear | Conv1D, hidden: Any, output: Any) -> bool:
    """Return whether a module's output is its input times its weight, plus its bias if there is
    one.

    `hidden`: the input. The module may compute in another dtype than the dtype of its weight.
    """
    if not isinstance(hidden, Tensor) or not isinstance(output, Tensor):
        return False
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    with torch.no_grad():
        product = nn.functional.linear(hidden.to(weight.dtype), weight, module.bias)
    tolerance = 16 * max(torch.finfo(dtype).eps for dtype in (weight.dtype, output.dtype))
    product, output = product.float(), output.detach().float()
    return product.shape == output.shape and torch.allclose(
        product, output, rtol=tolerance, atol=tolerance * float(product.abs().max())
    )


def has_adapters(model: Any) -> bool:
    """Return True if `add_adapters` has changed the model."""
    return hasattr(model, "peft_config")


def trainable_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable weights by name. A tied weight has one entry for each of its names."""
    return {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def save_adapter_configuration(path: Path, model: Any) -> None:
    """Write adapter_config.json into the directory `path`, in the format of `peft`."""
    model.peft_config[ADAPTER].save_pretrained(path)


def load_adapters(path: Path, model: nn.Module) -> None:
    """Load the trainable weights of `model`, in place, from adapter_model.safetensors in `path`.

    Raises InvalidInput (`student.lora`) if the file has other names or shapes than the model.
    """
    stored_weights = load_file(path / FILE) if (path / FILE).is_file() else {}
    parameters = {
        adapter_key(name): parameter for name, parameter in trainable_weights(model).items()
    }
    if {key: parameter.shape for key, parameter in parameters.items()} != {
        key: weight.shape for key, weight in stored_weights.items()
    }:
        raise InvalidInput(
            "the checkpoint has other adapters than the job",
            field="student.lora",
            hint="restore the table that the run started with, or submit a new job",
        )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(stored_weights[key])


def scale_adapters(path: Path, model: nn.Module) -> None:
    """Set the factor alpha / rank of all adapters of `model` from adapter_config.json in `path`."""
    from peft.tuners.lora import LoraLayer

    adapter_config = json.loads((path / CONFIGURATION).read_text())
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling[ADAPTER] = adapter_config["lora_alpha"] / adapter_config["r"]


def merge_adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in which each adapter is added to the weight of its layer, by their plain
    names.

    `weights`: unsharded weights by their names in `model`, of all layers or of some. The result is
    float32.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import transpose

    float32_weights = {
        name: weight.float() if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    plain_weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in float32_weights.items()
        if ".lora_" not in name
    }
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and f"{name}.weight" in plain_weights:
            a_matrix, b_matrix = (
                float32_weights[f"{name}.lora_{part}.{ADAPTER}.weight"] for part in "AB"
            )
            update = transpose(b_matrix @ a_matrix, layer.fan_in_fan_out) * layer.scaling[ADAPTER]
            plain_weights[f"{name}.weight"] = plain_weights[f"{name}.weight"] + update
    return plain_weights


def adapter_key(name: str) -> str:
    """Return the name that a trainable weight of the model has in files of `peft`."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")
