"""A causal language model that transformers knows: loaded, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from clients.data.tokenization import tokens_of
from protos.errors import InvalidInput

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(path: Path, *, dtype: str, device: str | None = None) -> Any:
    """The model with every weight, on the CPU; on the device "meta" without their values.

    Raises InvalidInput, naming --model or --dtype.
    """
    if dtype not in _DTYPES:
        raise InvalidInput(
            f"there is no dtype {dtype!r}", field="--dtype", hint=f"use one of {', '.join(_DTYPES)}"
        )
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            device_map=device,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of a wrong config the library raises anything
        raise not_loaded(path, str(error)) from error
    if loading["missing_keys"]:
        # transformers would fill them with random numbers and only warn.
        raise not_loaded(path, f"it has no weights for {min(loading['missing_keys'])}")
    return model


def load_vocabulary(path: Path) -> tuple[str, ...]:
    """The token of id 0, 1, ...; "" for an id without one. Raises InvalidInput."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_loaded(path, f"its tokenizer: {error}") from error
    return tuple(tokens_of(tokenizer))


def not_loaded(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"cannot load {path}: {' '.join(reason.split())[:300]}",
        field="--model",
        hint="give a complete causal language model that this version of transformers knows",
    )


def not_linear(model: str | Path) -> InvalidInput:
    return InvalidInput(
        f"the logits of {model} are not one linear layer of its hidden states",
        field="--model",
        hint="models that scale or cap their logits (Gemma 2, Granite, Cohere) are not supported",
    )
