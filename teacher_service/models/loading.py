"""Loads causal language models and their vocabulary with transformers."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from clients.data.images import ImageReader, makes_grids
from clients.data.models.files import quantisation_of
from clients.data.models.loaded_weights import check_loaded_weights, refuse_unscaled
from clients.data.tokens.loading import load_tokenizer
from clients.data.tokens.tokenizer import tokens_of
from protos.errors import InvalidInput
from teacher_service.models.device_map import DEVICE_MAP, Memory
from teacher_service.models.files import weight_files

log = logging.getLogger(__name__)

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# The files with the settings of an image processor.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def load_model(
    path: Path,
    *,
    dtype: str,
    device: str | None = None,
    with_images: bool = False,
    memory: Memory | None = None,
) -> Any:
    """Load the model on the CPU; with device "meta", without the values of its weights.

    With `with_images`, also load a vision-language model that is not a causal language model of
    transformers. With `memory`, divide the layers over these devices; each forward pass reads the
    remaining layers from the files.

    Raises InvalidInput with field --dtype if the dtype is unknown. Raises InvalidInput with field
    --model if the model cannot be loaded, if the files lack weights, or if transformers ignores a
    tensor of a weight, such as its scales.
    """
    _check_dtype(dtype)
    try:
        model, loading = _find_model_class(path, with_images).from_pretrained(
            path,
            dtype=dtype,
            device_map=device if memory is None else DEVICE_MAP,
            max_memory=None if memory is None else dict(memory),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises any exception for a wrong config
        raise build_load_error(path, str(error)) from error
    check_loaded_weights(str(path), loading["missing_keys"], loading["unexpected_keys"], "--model")
    refuse_unscaled(
        str(path),
        weight_files(path),
        loading["unexpected_keys"],
        "--model",
        is_quantised=quantisation_of(path, "--model") is not None,
    )
    return model


def load_skeleton(path: Path, *, dtype: str) -> Any:
    """Build the model on device "meta", without the values of its weights.

    Layers of a quantised model are built as plain layers, so the packages for quantised layers are
    not needed, and the files are not compared with the model. Raises InvalidInput as `load_model`
    does.
    """
    if quantisation_of(path, "--model") is None:
        return load_model(path, dtype=dtype, device="meta")
    _check_dtype(dtype)
    dtype_options = {} if dtype == "auto" else {"dtype": dtype}
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, **dtype_options)
    except Exception as error:  # the library raises any exception for a wrong config
        raise build_load_error(path, str(error)) from error


def load_image_reader(path: Path, config: Any) -> ImageReader | None:
    """Return the image reader of the model at `path`, or None if the model takes no images.

    An image reader needs the package pillow, and a processor that divides images into patches with
    a grid, as the processors of Qwen's models do. `config` is the configuration of the model.
    """
    placeholder = getattr(config, "image_token_id", None)
    if placeholder is None or not any((path / name).is_file() for name in _PROCESSORS):
        return None
    if find_spec("PIL") is None:
        log.warning("the teacher reads no images: the package pillow is not installed")
        return None
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            # The backend is always pil, so that the pixels do not depend on torchvision.
            path,
            backend="pil",
            trust_remote_code=False,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        log.warning("the teacher reads no images: %s", error)
        return None
    return ImageReader(processor, placeholder) if makes_grids(processor) else None


def _find_model_class(path: Path, with_images: bool) -> Any:
    """Return the class of transformers that loads the model at `path`."""
    causal_class = transformers.AutoModelForCausalLM
    if not with_images:
        return causal_class
    config = transformers.AutoConfig.from_pretrained(
        path, trust_remote_code=False, local_files_only=True
    )
    image_text_class = transformers.AutoModelForImageTextToText
    is_image_text_only = (
        type(config) in image_text_class._model_mapping
        and type(config) not in causal_class._model_mapping
    )
    return image_text_class if is_image_text_only else causal_class


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise InvalidInput(
            f"unknown dtype {dtype!r}", field="--dtype", hint=f"use one of {', '.join(_DTYPES)}"
        )


def find_body(model: Any) -> Any:
    """Return the module of a causal language model that gives its last hidden states."""
    body = model.base_model
    # Llama 4 names a body that its text model does not have; then transformers returns the model.
    return model.model if body is model else body


def max_length_of(model: Any) -> int:
    """Return the maximum tokens of a sequence; 4,096 if the configuration does not have a number.

    A number below 1 means no limit, such as the -1 of XLNet.
    """
    # A model of text and images, such as Gemma 3, has the limit in its `text_config`.
    config = model.config.get_text_config()
    max_length = int(getattr(config, "max_position_embeddings", None) or 0)
    return max_length if max_length > 0 else 4096


def load_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the tokens in order of id, "" for an unused id.

    Raises InvalidInput if the tokenizer cannot be loaded.
    """
    try:
        tokenizer = load_tokenizer(transformers, str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise build_load_error(path, f"its tokenizer: {error}") from error
    return tuple(tokens_of(tokenizer))


def build_load_error(path: Path, reason: str) -> InvalidInput:
    """Return the error for a model that cannot be loaded, for the caller to raise."""
    return InvalidInput(
        f"cannot load {path}: {' '.join(reason.split())[:300]}",
        field="--model",
        hint="give a complete causal language model that this version of transformers supports",
    )


def build_not_linear_error(model: str | Path) -> InvalidInput:
    """Return the error for a model with another head than a linear one, for the caller to raise."""
    return InvalidInput(
        f"the logits of {model} are not one linear layer of its hidden states, scaled or capped",
        field="--model",
        hint="give a model whose logits are s z or c tanh(s z / c) of the products z of its head",
    )
