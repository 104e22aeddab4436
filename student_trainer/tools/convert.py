"""Convert a model that jobs cannot read to a directory with unquantised .safetensors weights.

    python -m student_trainer.tools.convert MODEL OUTPUT

MODEL is a directory with an adapter (peft), PyTorch weights (pytorch_model.bin), or quantised
weights (FP8, bitsandbytes, compressed-tensors); or a GGUF file. An adapter is merged into its base
model, and quantised weights are dequantised, with the packages peft, gguf, bitsandbytes or
compressed-tensors. Code in a model directory is never run. OUTPUT is a new directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from clients.data.models.check import DEQUANTISED, has_tokenizer
from clients.data.models.files import (
    ADAPTER_CONFIG,
    WEIGHTS_INDEX,
    list_model_files,
    quantisation_of,
    read_object,
)
from protos.errors import DistillError, InvalidInput

_FIELD = "MODEL"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, and convert the model. If that fails, print a message and exit with 1."""
    parser = argparse.ArgumentParser(prog="convert", description="Convert a model.")
    parser.add_argument("model", type=Path, help="Directory of the model, or a GGUF file.")
    parser.add_argument("output", type=Path, help="New directory for the converted model.")
    options = parser.parse_args(arguments)
    try:
        convert(options.model, options.output)
    except (DistillError, OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(options.output)


def convert(model: Path, output: Path) -> None:
    """Write the directory `output`: the unquantised weights of `model`, and its tokenizer.

    The weights keep their dtype. Raises InvalidInput if `output` already exists or `model` does not
    exist, and the errors of transformers.
    """
    if output.exists():
        raise InvalidInput(f"{output} exists", field="OUTPUT", hint="give a new directory")
    if not model.exists():
        raise InvalidInput(
            f"{model} does not exist", field=_FIELD, hint="give a directory or a file"
        )
    is_gguf = model.is_file()
    options: dict[str, Any] = {"trust_remote_code": False, "dtype": "auto"}
    if is_gguf:
        model, options["gguf_file"] = model.parent, model.name
    base: str | None = None
    if (model / ADAPTER_CONFIG).is_file():
        base = str(read_object(model / ADAPTER_CONFIG, _FIELD).get("base_model_name_or_path"))
        loaded = _merge_adapter(model)
    else:
        loaded = _load_unquantised(model, options)
    loaded.save_pretrained(output)
    if has_tokenizer(model) or (base is not None and has_tokenizer(Path(base))):
        _copy_tokenizer(model if has_tokenizer(model) else Path(base or ""), output)
    else:
        options.pop("dtype")
        AutoTokenizer.from_pretrained(base or model, **options).save_pretrained(output)


def _merge_adapter(model: Path) -> Any:
    """Load the base model of an adapter, and merge the adapter into its weights."""
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(model, dtype="auto").merge_and_unload()


def _load_unquantised(model: Path, options: dict[str, Any]) -> Any:
    """Load a model with transformers, and dequantise its weights."""
    entry = quantisation_of(model, _FIELD) or {}
    method = "gguf" if "gguf_file" in options else entry.get("quant_method")
    if method not in (None, "gguf", *DEQUANTISED):
        raise InvalidInput(
            f"transformers does not dequantise {method}",
            field=_FIELD,
            hint="give the model in bfloat16 or float32",
        )
    if method == "bitsandbytes":
        return AutoModelForCausalLM.from_pretrained(model, **options).dequantize()
    if method is not None:
        settings = AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)
        options = {**options, "quantization_config": settings}
    return AutoModelForCausalLM.from_pretrained(model, **options)


def _copy_tokenizer(source: Path, output: Path) -> None:
    """Copy tokenizer and chat templates from a model directory, unless `output` already has the
    files.
    """
    skipped = (ADAPTER_CONFIG, WEIGHTS_INDEX, "config.json")
    for name in list_model_files(source):
        is_weights = name.endswith(".safetensors") or name in skipped or name.startswith("anchor/")
        if is_weights or (output / name).exists():
            continue
        (output / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, output / name)


if __name__ == "__main__":
    main()
