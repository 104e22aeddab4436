"""Refuses model directories that a program cannot use, before a job or a model uses them.

Preflight, trainer, evaluation and teacher share these checks. `field` is the key or option that
errors name. Does not import torch, and reads only JSON files and the headers of weight files.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from clients.data.models.files import (
    ADAPTER_CONFIG,
    WEIGHTS_INDEX,
    list_weight_files,
    quantisation_of,
    read_dtypes,
    read_object,
    shard_names,
)
from clients.data.tokens.loading import (
    INSTALL_SENTENCEPIECE,
    NO_SENTENCEPIECE,
    SENTENCEPIECE_FILE,
    reads_sentencepiece,
)
from clients.data.tokens.tokenizer import chat_templates_in
from protos.errors import InvalidInput

# The program that reads a model: the trainer of a student, an evaluation, or an engine of the
# teacher. The endpoint engine reads the tokenizer only.
Reader: TypeAlias = Literal["trainer", "evaluation", "hf", "vllm", "endpoint"]

CONVERT = "python -m student_trainer.tools.convert"
_TOKENIZER_FILES = (
    *("tokenizer.json", SENTENCEPIECE_FILE, "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt"),
)
_COMPLETE_DIRECTORY = "give a Hugging Face directory with config, tokenizer and safetensors"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# Entries of config.json.
_LAYER_COUNTS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
# Modules that transformers imports to read quantised weights, by `quant_method`.
_QUANTISATION_MODULES: Mapping[str, Sequence[str]] = {
    "awq": ["gptqmodel"],
    "bitsandbytes": ["bitsandbytes"],
    "compressed-tensors": ["compressed_tensors"],
    "gptq": ["optimum", "gptqmodel"],
}
_NOT_IN_VLLM = ("bitsandbytes",)
# Methods that CONVERT dequantises. The weights of the others are published unquantised, too.
DEQUANTISED = ("bitsandbytes", "compressed-tensors", "fp8")


def check_model(
    path: Path, field: str, reader: Reader, *, here: bool = True, has_template: bool = False
) -> tuple[str, ...]:
    """Check a model directory for the program that will read it.

    `here`: the program runs in this Python environment, so the packages that it needs are checked.
    `has_template`: the job names a chat template for the student.

    Returns warnings about behaviour that users may not expect; usually none. Raises
    InvalidInput if the program cannot use the directory. The hint is the command or the change that
    makes the directory usable, if there is one.
    """
    check_weights(path, field)
    entry = quantisation_of(path, field)
    if entry is not None:
        _check_quantisation(path, str(entry.get("quant_method")), field, reader, here=here)
    else:
        _refuse_undeclared_float8(path, field)
    _check_tokenizer(path, field, here=here)
    notes = []
    if entry is not None and reader in ("hf", "vllm"):
        notes.append(
            f"the weights of {path} are quantised ({entry.get('quant_method')}): its rows include"
            " the error of the quantisation"
        )
    if reader == "trainer" and not has_template and _lacks_template(path):
        notes.append(
            f"{path} has no chat template: prompts are texts as they are; records that are messages"
            " need student.chat_template, such as a .jinja file"
        )
    return tuple(notes)


def check_weights(path: Path, field: str) -> None:
    """Raise InvalidInput if a directory lacks the configuration or the weights of a model.

    An adapter, Python code, and weights in other formats than safetensors are refused.
    """
    if path.is_file():
        is_gguf = path.suffix == ".gguf"
        remedy = _hint_command("convert it", path) if is_gguf else "give the model's directory"
        raise InvalidInput(f"{path} is a file, not a directory", field=field, hint=remedy)
    refuse_adapter(path, field)
    has_weights = bool(list_weight_files(path, field))
    if not has_weights and (gguf_files := find_gguf_files(path)):
        raise InvalidInput(
            f"{path} has a GGUF file ({gguf_files[0].name}), but no .safetensors weights",
            field=field,
            hint=_hint_command("convert it", gguf_files[0], path),
        )
    check_configuration(path, field)
    if not has_weights:
        files = sorted(file.name for file in path.iterdir() if file.suffix in _TORCH_SUFFIXES)
        raise InvalidInput(
            f"no .safetensors weights in {path}"
            + (f", only {files[0]}, a format that can run code when it is loaded" if files else ""),
            field=field,
            hint=_hint_command("convert it without running code", path)
            if files
            else _COMPLETE_DIRECTORY,
        )


def check_configuration(path: Path, field: str) -> None:
    """Raise InvalidInput if a directory lacks the configuration of a model.

    A directory with a part of its weight files is refused. A directory without any weight files is
    accepted. An adapter and Python code are refused.
    """
    refuse_adapter(path, field)
    if not (path / "config.json").is_file():
        raise InvalidInput(f"no config.json in {path}", field=field, hint=_COMPLETE_DIRECTORY)
    refuse_code(path, field)
    refuse_missing_files(path, field)


def find_gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files of a directory, the largest (with the most bits per weight) first."""
    return sorted(path.glob("*.gguf"), key=lambda file: (-file.stat().st_size, file.name))


def has_tokenizer(path: Path) -> bool:
    """Return whether a directory has the files of a tokenizer."""
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def refuse_adapter(path: Path, field: str) -> None:
    """Raise InvalidInput if a model directory contains an adapter.

    transformers would load the adapter, and would load its base model from another place.
    """
    if not (path / ADAPTER_CONFIG).is_file():
        return
    if (path / "config.json").is_file() and list_weight_files(path, field):
        raise InvalidInput(
            f"{path} has an adapter beside its weights",
            field=field,
            hint=f"move {ADAPTER_CONFIG} and the adapter to a directory of their own, to use the"
            " weights without the adapter or to merge the two",
        )
    base = read_object(path / ADAPTER_CONFIG, field).get("base_model_name_or_path")
    raise InvalidInput(
        f"{path} is an adapter of {base or 'another model'}, not a model",
        field=field,
        hint=_hint_command("merge it into its base model", path),
    )


def refuse_code(path: Path, field: str) -> None:
    """Raise InvalidInput, naming `field`, if a model directory has code or pickled weights.

    The weight index is also checked, because transformers opens every file in the index, in any
    format, even with `use_safetensors=True`.
    """
    config = read_object(path / "config.json", field)
    if "auto_map" in config:
        model_type = str(config.get("model_type"))
        raise InvalidInput(
            f"{path} has its own Python code (auto_map), which is never run",
            field=field,
            hint=f"remove the entry auto_map from config.json: transformers has code for the type"
            f" {model_type}"
            if _is_known_type(model_type)
            else "use a model whose architecture is part of transformers",
        )
    shard_names(path, field)


def _is_known_type(model_type: str) -> bool:
    """Return whether the installed transformers has the code of a model type. Imports nothing."""
    package = find_spec("transformers")
    name = model_type.replace("-", "_")
    return (
        name.isidentifier()
        and package is not None
        and any(
            (Path(place) / "models" / name / f"modeling_{name}.py").is_file()
            for place in package.submodule_search_locations or ()
        )
    )


def refuse_quantisation(model: str, entry: Any, field: str) -> None:
    """Raise InvalidInput for the quantised weights of a student.

    `model`: a directory or hub id. `entry`: the `quantization_config` of the model.
    """
    method = entry.get("quant_method", "unknown method") if isinstance(entry, dict) else entry
    hint = "give the model in bfloat16 or float32"
    if method in DEQUANTISED:
        hint += f", or {_hint_command('dequantise it', Path(model))}"
    raise InvalidInput(
        f"the weights of {model} are quantised ({method}), and quantised weights cannot be trained",
        field=field,
        hint=hint,
    )


def _check_quantisation(path: Path, method: str, field: str, reader: Reader, *, here: bool) -> None:
    """Raise InvalidInput if the program that reads the model cannot read quantised weights."""
    if reader == "trainer":
        refuse_quantisation(str(path), {"quant_method": method}, field)
    problem, remedies = "", []
    modules = _QUANTISATION_MODULES.get(method, ()) if here else ()
    if reader in ("hf", "evaluation") and not all(map(find_spec, modules)):
        packages = [module.replace("_", "-") for module in modules]
        problem = f"requires {' and '.join(packages)}"
        remedies.append(f"pip install {' '.join(packages)}")
        if reader == "hf" and method not in _NOT_IN_VLLM:
            remedies.append("use the engine vllm")
    if reader == "vllm" and method in _NOT_IN_VLLM:
        problem = "the engine vllm does not read"
        remedies.append("use the engine hf")
    if not problem:
        return
    if method in DEQUANTISED:
        remedies.append(_hint_command("dequantise it", path))
    raise InvalidInput(
        f"the weights of {path} are quantised ({method}), which {problem}",
        field=field,
        hint=", or ".join(remedies),
    )


def _refuse_undeclared_float8(path: Path, field: str) -> None:
    """Raise InvalidInput for float8 weights whose scale config.json does not declare."""
    for file in list_weight_files(path, field):
        for name, dtype in read_dtypes(file).items():
            if dtype.startswith("F8"):
                raise InvalidInput(
                    f"{name} of {path} is {dtype}, and config.json declares no quantisation, so its"
                    " scale is unknown",
                    field=field,
                    hint="give an unquantised checkpoint",
                )


def _check_tokenizer(path: Path, field: str, *, here: bool) -> None:
    """Raise InvalidInput if a directory has no tokenizer, or a tokenizer that cannot be read.

    `here`: the packages of this Python environment must be able to read the tokenizer.
    """
    if not has_tokenizer(path):
        # transformers would create an empty tokenizer.
        raise InvalidInput(
            f"{path} has no tokenizer",
            field=field,
            hint="save the tokenizer into the same directory",
        )
    needs_converter = not (path / "tokenizer.json").is_file()
    needs_converter = needs_converter and (path / SENTENCEPIECE_FILE).is_file()
    if needs_converter and here and not reads_sentencepiece():
        raise InvalidInput(f"{path} {NO_SENTENCEPIECE}", field=field, hint=INSTALL_SENTENCEPIECE)


def _lacks_template(path: Path) -> bool:
    try:
        return not chat_templates_in(path)
    except (OSError, ValueError):
        return False  # the loader of the tokenizer reports the fault


def refuse_missing_files(path: Path, field: str) -> None:
    """Raise InvalidInput if a directory lacks a file of its weight index, or nearly all layers."""
    files = list_weight_files(path, field)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise InvalidInput(
            f"{path} lacks {missing[0]}{others}, which {WEIGHTS_INDEX} names",
            field=field,
            hint="copy the whole directory again",
        )
    if files == [path / "model.safetensors"]:
        tensors = len(read_dtypes(files[0]))
    else:
        tensors = len(read_object(path / WEIGHTS_INDEX, field).get("weight_map", ()))
    _refuse_missing_layers(path, tensors, field)


def _refuse_missing_layers(path: Path, tensors: int, field: str) -> None:
    """Raise InvalidInput if config.json has over 100 times more layers than the files have tensors.

    transformers would create all layers before it searches for their weights. The limit is high,
    because a model may use a tensor in several layers. `tensors`: number of tensors in the files; 0
    if the files are not readable, which is reported later.
    """
    config = read_object(path / "config.json", field)
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key in part.keys() & _LAYER_COUNTS:
            if isinstance(part[key], int) and part[key] > 100 * tensors > 0:
                raise InvalidInput(
                    f"{path / 'config.json'} has {key} = {part[key]}, but the model's files have"
                    f" {tensors} tensors",
                    field=field,
                    hint="save the whole model again, with the config.json it belongs to",
                )


def _hint_command(purpose: str, source: Path, output: Path | None = None) -> str:
    """Return a hint with the command that converts `source` to a usable model directory.

    The command writes the new directory beside `output`, or beside `source` if `output` is None.
    """
    name = f"{(output or source).name.removesuffix('.gguf')}-converted"
    target = (output or source).with_name(name)
    return f"{purpose}: {CONVERT} {shlex.quote(str(source))} {shlex.quote(str(target))}"
