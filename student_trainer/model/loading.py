"""Loads the student's configuration, tokenizer and weights from a directory or from the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from clients.config.tables.common import StudentConfig
from clients.data.hub import find_on_hub, hub_error, is_hub_id
from clients.data.images import ImageReader, makes_grids, require_pillow
from clients.data.models.check import (
    check_configuration,
    check_weights,
    refuse_code,
    refuse_quantisation,
)
from clients.data.models.files import quantisation_of
from clients.data.models.loaded_weights import check_loaded_weights, refuse_unscaled
from clients.data.tokens import loading as tokens
from clients.data.tokens.tokenizer import read_template
from protos.errors import InvalidInput
from student_trainer.model.lora import add_adapters, load_adapters
from student_trainer.model.probes import uses_images

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

log = logging.getLogger(__name__)

Check = Callable[[Path, str], None]
# Dtypes of safetensors whose values float32 holds exactly.
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Parts of the names of configuration entries that make training differ from evaluation: dropout,
# noise on the inputs of routers, and the factors that RWKV applies to its weights for evaluation.
_NOISE = ("drop", "jitter", "rescale_every")


def recompute_activations(model: Any, policy: bool | int | str) -> None:
    """Enable activation recomputation in the layers of a transformers model, in place.

    `policy` is the job's `student.gradient_checkpointing`:

    - False: no layer recomputes activations.
    - True: every layer recomputes all its activations.
    - n >= 2: every n-th layer recomputes all its activations.
    - "selective": every layer keeps the outputs of matrix products and of attention, and recomputes
      all other activations (Korthikanti et al., arXiv 2205.05198).

    The gradients are the same with every policy.
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


def load_config(student: StudentConfig) -> Any:
    """Return the configuration of the student's model.

    Raises InvalidInput (`student.model`) if there is no usable model, or if the model needs custom
    code. Raises Unavailable if the hub does not answer and the local cache lacks the model.
    """
    return _load_pretrained(student, AutoConfig.from_pretrained, check=check_configuration)


def local_directory(student: StudentConfig) -> Path:
    """Return the local directory of the student's model.

    For a model on the hub, this is a directory in the hub's cache on this machine.
    """
    path = Path(student.model)
    if path.is_dir():
        return path
    return Path(cached_file(student.model, "config.json", revision=student.revision)).parent


def require_trainable(student: StudentConfig) -> None:
    """Raise InvalidInput if the student's weights are quantised and thus not trainable."""
    config = load_config(student)
    for part in (config, config.get_text_config()):
        if entry := getattr(part, "quantization_config", None):
            refuse_quantisation(student.model, entry, "student.model")


def load_tokenizer(student: StudentConfig) -> Any:
    """Return the tokenizer of the student's model.

    If the job names a file of a chat template, the tokenizer gets this template. Raises the same
    errors as `load_config`, and InvalidInput if the tokenizer fails to encode a text.
    """

    def load(model: str, *, revision: str | None, **_: Any) -> Any:
        return tokens.load_tokenizer(transformers, model, revision)

    tokenizer = _load_pretrained(student, load, check=refuse_code)
    if student.chat_template not in (None, "teacher"):
        tokenizer.chat_template = _read_chat_template(student.chat_template)
    return tokenizer


def _read_chat_template(name: str) -> str:
    try:
        return read_template(Path(name))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"cannot read {name}: {error}",
            field="student.chat_template",
            hint="name a .jinja file",
        ) from error


def load_generation_config(student: StudentConfig) -> Any:
    """Return the generation config of the student, from generation_config.json.

    Without this file, the generation config is derived from config.json.
    """
    revision = None if Path(student.model).is_dir() else student.revision
    try:
        return GenerationConfig.from_pretrained(student.model, revision=revision)
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(load_config(student))


def load_image_reader(student: StudentConfig, field: str = "data.image_column") -> ImageReader:
    """Return the reader that converts images of prompts into inputs of the student's model.

    `field`: the key of the job that requires images, for error messages. Raises InvalidInput in
    these cases: the package pillow is missing, the image processor cannot be read, or the model
    does not read images as patches with a grid.
    """
    require_pillow(field)
    placeholder = getattr(load_config(student), "image_token_id", None)
    if placeholder is not None:
        # The same pixels whether torchvision is installed or not.
        processor = _load_pretrained(student, AutoImageProcessor.from_pretrained, backend="pil")
        if makes_grids(processor):
            return ImageReader(processor, int(placeholder))
    raise InvalidInput(
        f"{student.model!r} reads no images, or does not read them as patches with a grid",
        field=field,
        hint="choose a student such as Qwen2.5-VL or Qwen3-VL, or remove the key",
    )


def computes_in_bfloat16(student: StudentConfig) -> bool:
    """Return True if the student computes in bfloat16 on this machine, False if in float32."""
    if student.dtype == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return student.dtype == "bfloat16"


def count_weights(student: StudentConfig) -> int:
    """Return the number of weights of the student, without adapters. Loads no weights."""
    with torch.device("meta"):
        config = load_config(student)
        model = _class_for(config, with_images=True).from_config(config)
    return int(model.num_parameters())


def load_model(
    student: StudentConfig,
    directory: Path | None = None,
    *,
    mapped: bool = False,
    images: ImageReader | None = None,
) -> Any:
    """Return the student's model with its weights.

    - directory: the model directory of a checkpoint, from which the weights are loaded; None: load
      them from `student.model`. With adapters, a checkpoint contains only the adapters, and the
      frozen weights are always loaded from `student.model`.
    - mapped: keep the weights that would be float32 in the dtype of their files, mapped into
      memory. All processes of a machine then share their memory. `cast_weights` converts them to
      float32.
    - images: the image reader, to load a vision-language model; the model's saved directories then
      contain the settings of its processor. None: load the text model.

    The weights are float32, with one exception: with adapters, the frozen weights have the compute
    dtype. Dropout and other noise are disabled.

    Raises InvalidInput if there is no usable model, or if the adapters of the checkpoint do not
    match `student.lora`.
    """
    weights_source = student
    if directory is not None and student.lora is None:
        weights_source = student.model_copy(update={"model": str(directory)})
    config = _without_noise(load_config(weights_source))
    # Frozen weights are never updated, so they can be stored in the dtype of the computation.
    in_bf16 = student.lora is not None and computes_in_bfloat16(student)
    model, loading = _load_pretrained(
        weights_source,
        _class_for(config, with_images=images is not None).from_pretrained,
        config=config,
        dtype=torch.bfloat16
        if in_bf16
        else _stored_dtype(weights_source)
        if mapped
        else torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    _check_loaded(weights_source, model, loading)
    _warn_of_auxiliary_loss(config)
    if mapped and not in_bf16:
        _restore_buffers(model, config)
    if images is not None:
        if not uses_images(model, images):
            raise InvalidInput(
                f"images do not change the output of {student.model!r}",
                field="student.model",
                hint="choose a student such as Qwen2.5-VL or Qwen3-VL",
            )
        model.image_processor = images.processor  # saved with the model
    if student.lora is not None:
        add_adapters(model, student, with_images=images is not None)
        if directory is not None:
            load_adapters(directory, model)
    recompute_activations(model, student.gradient_checkpointing)
    return model


def _check_loaded(
    student: StudentConfig, model: Any, loading: Mapping[str, Collection[str]]
) -> None:
    """Raise InvalidInput if a weight of the model was not loaded from the model's files.

    `loading`: the report that `from_pretrained` returns with `output_loading_info`. Also raises
    InvalidInput if the files have weights that the model does not use, or if the directory has an
    adapter beside the weights.
    """
    name, unused = student.model, loading["unexpected_keys"]
    files = [Path(file) for file in _load_pretrained(student, _weight_files)]
    is_quantised = quantisation_of(local_directory(student), "student.model") is not None
    refuse_unscaled(name, files, unused, "student.model", is_quantised=is_quantised)
    check_loaded_weights(name, loading["missing_keys"], unused, "student.model")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InvalidInput(
            f"{name} has an adapter beside its weights",
            field="student.model",
            hint="merge the adapter into the weights, or give another model",
        )


def _class_for(config: Any, *, with_images: bool) -> Any:
    """Return the class of transformers that loads a model with this configuration."""
    causal = AutoModelForCausalLM
    if not with_images or type(config) in causal._model_mapping:
        return causal
    return AutoModelForImageTextToText


def cast_weights(module: nn.Module, *, bf16: bool) -> None:
    """Cast weights of `module` to float32, in place. A sharded weight is cast as the local shard.

    `bf16`: cast only trainable weights. Weights that are already float32 stay the same tensors.
    """

    def cast(tensor: Tensor) -> Tensor:
        to_float32 = tensor.is_floating_point() and (tensor.requires_grad or not bf16)
        return tensor.float() if to_float32 else tensor

    module._apply(cast)  # type: ignore[no-untyped-call]  # as Module.float() does


def _stored_dtype(student: StudentConfig) -> torch.dtype:
    """Return the dtype of the weights in the model's files; float32 if the files have several
    dtypes.

    The dtype in config.json is ignored, because it may differ from the dtype of the files.
    """
    files = _load_pretrained(student, _weight_files)
    dtype_names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as weight_file:
            dtype_names |= {weight_file.get_slice(name).get_dtype() for name in weight_file.keys()}  # noqa: SIM118
    dtypes = {_STORED.get(name) for name in dtype_names if name[0] in "BF" and name != "BOOL"}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype or torch.float32


def _weight_files(model: str, *, revision: str | None, **_: Any) -> list[str]:
    """Return the paths of the safetensors files from which transformers loads the weights.

    `model`: a directory, or the id of a model on the hub.
    """
    optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if single := cached_file(model, "model.safetensors", **optional):
        return [single]
    index = cached_file(model, "model.safetensors.index.json", revision=revision)
    files: list[str] = get_checkpoint_shard_files(model, index, revision=revision)[0]
    return files


def _restore_buffers(model: Any, config: Any) -> None:
    """Give a mapped model the buffers and the dtype of a float32 model.

    Some buffers are computed and are in no file. Loading has rounded them to the dtype of the
    files. This function replaces them by unrounded buffers.
    """
    with init_empty_weights(include_buffers=False):
        float32_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module, float32_module in zip(model.modules(), float32_model.modules(), strict=True):
        for name, buffer in float32_module.named_buffers(recurse=False):
            if name in float32_module._non_persistent_buffers_set:
                setattr(module, name, buffer)
            else:
                setattr(module, name, getattr(module, name).to(buffer.dtype))
        if hasattr(module, "config"):
            module.config.dtype = torch.float32


def _without_noise(config: Any) -> Any:
    """Disable everything in a configuration that makes training differ from evaluation. Return it.

    This is dropout, jitter, and the rescaling of RWKV. With such noise, the trained model would
    differ from the model that samples, and a run could not be reproduced.
    """
    # A model of images and text has a configuration for each of the two.
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in part.to_dict().items() if part is not None else ():
            is_rate = isinstance(value, int | float) and not isinstance(value, bool)
            if is_rate and any(noise in name for noise in _NOISE):
                setattr(part, name, type(value)(0))
    return config


def _warn_of_auxiliary_loss(config: Any) -> None:
    text_config = config.get_text_config()
    if getattr(text_config, "output_router_logits", False):
        log.warning(
            "output_router_logits is set: the router's auxiliary loss (router_aux_loss_coef %s) is"
            " not part of any method's loss, and is not trained on",
            getattr(text_config, "router_aux_loss_coef", "unset"),
        )


def _load_pretrained(
    student: StudentConfig, load: Any, check: Check = check_weights, **options: Any
) -> Any:
    path = Path(student.model)
    if path.is_dir():
        check(path, "student.model")
    revision = student.revision if not path.is_dir() else None
    try:
        if is_hub_id(student.model):
            find_on_hub(student.model)
        return load(student.model, revision=revision, trust_remote_code=False, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a broken directory makes the libraries raise anything
        location_kind = "directory" if path.is_dir() else "directory or reachable hub id"
        message = f"no usable model at {student.model!r}: {_first_line(error)}"
        hint = f"give a Hugging Face {location_kind} with config, tokenizer and safetensors"
        if path.is_dir():
            raise InvalidInput(message, field="student.model", hint=hint) from error
        raise hub_error(error, message, field="student.model", hint=hint) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def vocabulary(tokenizer: Any) -> list[str]:
    """Return the tokens of the tokenizer by id; "" for an id without a token."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [token or "" for token in tokens]
