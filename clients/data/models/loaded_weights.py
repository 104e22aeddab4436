"""Refuses weights that transformers has loaded incorrectly: missing, unused or unscaled."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from clients.data.models.files import read_dtypes
from protos.errors import InvalidInput

log = logging.getLogger(__name__)


def check_loaded_weights(
    model: str, missing: Collection[str], unused: Collection[str], field: str
) -> None:
    """Raise InvalidInput if the files lack a weight of the model; log weights that are not used.

    `missing`: weights that are in no file, which transformers would initialise randomly. `unused`:
    names in the files that the model does not have, for example the last layers if config.json
    specifies too few layers.
    """
    if not missing:
        if unused:
            log.warning(
                "%s has %d tensors that its architecture does not use, such as %s; check its"
                " config.json if it should use them",
                *(model, len(unused), min(unused)),
            )
        return
    name, hint = min(missing), "save the whole model again, with its config.json"
    for other in sorted(unused):
        if unwrapped := _unwrapped_name(other, missing):
            name = unwrapped
            hint = f"its files have {other!r} instead: save the model itself, not its wrapper"
            break
    others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
    raise InvalidInput(f"{model} has no weights for {name}{others}", field=field, hint=hint)


def refuse_unscaled(
    model: str, files: Sequence[Path], unused: Collection[str], field: str, *, is_quantised: bool
) -> None:
    """Raise InvalidInput if scaled weights of a model would be loaded without their scales.

    transformers ignores the scales if config.json does not declare the quantisation method, or
    declares an unknown method. `files`: the .safetensors files of the model. `unused`: tensors in
    the files that the loaded model does not have. `is_quantised`: config.json declares a method.
    """
    dtypes: dict[str, str] = {}
    for file in files:
        dtypes |= read_dtypes(file)
    for name in sorted(unused):
        layer, _, last = name.rpartition(".")
        weight = f"{layer}.weight"
        if last != "bias" and weight in dtypes and weight not in unused:
            raise InvalidInput(
                f"transformers does not use {name} of {model}: its weights are quantised in a way"
                " that transformers does not know, or that config.json does not declare",
                field=field,
                hint="give an unquantised checkpoint, or one that transformers supports",
            )
    for name, dtype in dtypes.items():
        if dtype.startswith("F8") and not is_quantised:
            raise InvalidInput(
                f"{name} of {model} is {dtype}, and config.json declares no quantisation, so its"
                " scale is unknown",
                field=field,
                hint="give an unquantised checkpoint",
            )


def _unwrapped_name(wrapped: str, names: Collection[str]) -> str | None:
    """Return the name in `names` that a wrapper has saved as `wrapped`; None if there is none.

    The wrappers torch.compile and DDP add a prefix. peft adds a prefix, or inserts `base_layer`
    before the last part of the name.
    """
    parts = wrapped.replace(".base_layer.", ".").split(".")
    return next((name for n in range(len(parts)) if (name := ".".join(parts[n:])) in names), None)
