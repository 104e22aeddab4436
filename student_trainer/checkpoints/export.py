"""The export of the trained model: a plain Hugging Face directory, written layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion

from protos.errors import InvalidInput
from student_trainer.checkpoints.atomic_directory import write_atomically
from student_trainer.checkpoints.model_directory import (
    make_next_token_layers,
    read_source_files,
    remove_aliases,
    split_weights,
    write_small_files,
)
from student_trainer.checkpoints.next_token_layers import NextTokenLayers
from student_trainer.checkpoints.tensor_file import PartWriter, build_layout
from student_trainer.model.lora import FILE as ADAPTERS
from student_trainer.model.lora import (
    adapter_key,
    has_adapters,
    merge_adapters,
    save_adapter_configuration,
    trainable_weights,
)
from student_trainer.parallel.shards import full_tensors
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)


def export_model(
    path: Path,
    *,
    model: Any,
    tokenizer: Any,
    source: Path | None = None,
    source_files: Mapping[str, bytes] | None = None,
    note: Callable[[str], None] = log.warning,
    anchor: Anchor | None = None,
    dtype: torch.dtype = torch.float32,
    main: bool = True,
) -> None:
    """Collective. Write the model as a plain Hugging Face directory.

    The weights are rounded to `dtype`. LoRA adapters are merged into the weights, and are also
    stored separately in `adapter/`, without rounding. The anchor is written in the same way into
    `anchor/`.

    - source: the directory of the original model; None for a model created in memory.
    - source_files: the result of `read_source_files` from the start of the run; None: read the
      files now.
    - note: a function that gets messages about the export for the user.
    - main: whether this process writes the files. In addition to the model, it needs memory for the
      weights of one layer or of the embeddings.

    Raises InvalidInput (`export.dtype`) if `dtype` is float16 and a number is beyond its range.
    Raises WrongState if a newer attempt has taken over the run.
    """
    if source is not None and source_files is None and main:
        source_files = read_source_files(source, tokenizer.chat_template)
    weights = model.state_dict(keep_vars=True)
    models = {"": weights}
    if anchor is not None:
        models["anchor"] = anchor.with_anchor_weights(weights)

    def write(partial: Path | None) -> None:
        overflows: list[str] = []
        for name, model_weights in models.items():
            path = partial / name if partial is not None else None
            unread = None
            if path is not None:
                path.mkdir(exist_ok=True)
                write_small_files(path, model, dtype, tokenizer, source_files)
                unread = make_next_token_layers(source, path, model, published_shapes(model))
                if correction := unread.correct_count():
                    note(correction)
            overflows += _write_model(path, model, model_weights, dtype, unread)
        if overflows:  # after all collectives
            raise InvalidInput(
                f"{overflows[0]} has a value above {torch.finfo(dtype).max:g}, the maximum of"
                f" float16",
                field="export.dtype",
                hint='set export.dtype = "bfloat16"',
            )

    if main:
        write_atomically(path, write)
    else:
        write(None)


def _write_model(
    path: Path | None,
    model: Any,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    unread: NextTokenLayers | None,
) -> Sequence[str]:
    """Collective. Write the weights of a model directory and, for LoRA, its directory `adapter/`.

    See `write_weights` for the arguments and the result.
    """
    overflows = write_weights(path, model, weights, dtype, unread)
    if has_adapters(model):
        adapters = {name: weights[name] for name in trainable_weights(model)}
        write_adapters(path / "adapter" if path is not None else None, model, adapters)
    return overflows


def write_weights(
    path: Path | None,
    model: Any,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    unread: NextTokenLayers | None = None,
) -> Sequence[str]:
    """Collective. Write the weights of a model directory, with LoRA adapters merged into them.

    - path: the directory; a process whose `path` is None writes nothing.
    - weights: by name, the weights of `model`, or other tensors to write in their place.
    - unread: the layers that transformers does not load, to be written too.

    If `dtype` is float16, returns the names of the weights that have a number beyond its range.
    Raises OSError only after all collectives.
    """
    published = PublishedWeights(model, weights, dtype)
    sizes = published.sizes | (unread.sizes() if unread is not None else {})
    files, index = split_weights(sizes, model.num_parameters())
    os_errors: list[OSError] = []
    with ExitStack() as stack:
        writers: dict[str, PartWriter] = {}
        with _collect_os_errors(os_errors):
            if path is not None:
                for file, file_weights in files.items():
                    writer = PartWriter(
                        path / file, build_layout(file_weights, {"format": "pt"}), hashed=False
                    )
                    writers |= dict.fromkeys(file_weights, stack.enter_context(closing(writer)))
        for group in published.iterate_layers(lambda: path is not None and not os_errors):
            with _collect_os_errors(os_errors):
                for name, weight in group.items():
                    writers[name].write(name, weight)
        with _collect_os_errors(os_errors):
            for name, weight in unread.iterate() if unread is not None else ():
                writers[name].write(name, weight)
    if os_errors:
        raise os_errors[0]
    if path is not None:
        for name, text in index.items():
            (path / name).write_bytes(text)
    return published.overflows


class PublishedWeights:
    """The weights of a model in the form that `write_weights` writes: merged, rounded and renamed.

    - sizes: each weight by its name in the files, as a tensor without data, in the order of
      `iterate_layers`.
    - overflows: for float16, the names of weights that have a number beyond its range. Only the
      layers that `iterate_layers` has already yielded are included.
    """

    def __init__(self, model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Store the weights.

        `weights`: by name, the weights of `model`, or other tensors to write in their place.
        """
        self._model = model
        self._dtype = dtype
        self.overflows: list[str] = []
        self._stored = remove_aliases(model, weights)
        sizes = {name: _meta_like(weight) for name, weight in self._stored.items()}
        self._group_by_layer = _group_by_layer(model, sizes, _to_published(model, sizes, dtype))
        self.sizes: dict[str, Tensor] = {}
        for group in self._group_by_layer:
            self.sizes |= _to_published(model, group, dtype)

    def iterate_layers(self, keep: Callable[[], bool]) -> Iterator[dict[str, Tensor]]:
        """Collective. Yield the unsharded weights on the CPU, one layer at a time.

        `keep`: returns whether this process needs the weights of the next layer. A process that
        does not need them takes part in the collective, and gets {}.
        """
        for group in self._group_by_layer:
            full = full_tensors({name: self._stored[name] for name in group}, keep=keep())
            moved = {name: weight.cpu() for name, weight in full.items()}
            if not moved:
                yield {}
                continue
            plain = _merge(self._model, moved)
            rounded = _round(self._model, plain, self._dtype)
            if self._dtype == torch.float16:
                self.overflows += [
                    name
                    for name, weight in rounded.items()
                    if weight.isinf().any() and not plain[name].isinf().any()
                ]
            yield _rename(self._model, rounded)


def published_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that `write_weights` writes, by its name in the files.

    The tensors of the model may be without data (device meta).
    """
    stored = remove_aliases(model, model.state_dict(keep_vars=True))
    sizes = {name: _meta_like(weight) for name, weight in stored.items()}
    published = _to_published(model, sizes, torch.float32)
    return {name: tuple(weight.shape) for name, weight in published.items()}


def write_adapters(path: Path | None, model: Any, adapters: Mapping[str, Tensor]) -> None:
    """Collective. Write the adapters in the format of `peft`, without rounding.

    `path`: the directory; a process whose `path` is None writes nothing. `adapters`: by name, the
    adapters of `model`, or other tensors to write in their place. Raises OSError only after all
    collectives.
    """
    os_errors: list[OSError] = []
    with ExitStack() as stack:
        writer = None
        with _collect_os_errors(os_errors):
            if path is not None:
                path.mkdir(exist_ok=True)
                save_adapter_configuration(path, model)
                stored_adapters = {adapter_key(name): weight for name, weight in adapters.items()}
                writer = PartWriter(path / ADAPTERS, build_layout(stored_adapters), hashed=False)
                stack.enter_context(closing(writer))
        for name, adapter in adapters.items():
            full = full_tensors({name: adapter}, keep=writer is not None and not os_errors)
            with _collect_os_errors(os_errors):
                for weight in full.values():
                    assert writer is not None
                    writer.write(adapter_key(name), weight.cpu())
    if os_errors:
        raise os_errors[0]


@contextmanager
def _collect_os_errors(os_errors: list[OSError]) -> Iterator[None]:
    """Catch an OSError in this context and append it to `os_errors`.

    The process then still takes part in later collectives.
    """
    try:
        yield
    except OSError as error:
        os_errors.append(error)


def _to_published(
    model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return weights in the form of the files: merged, rounded to `dtype` and renamed.

    `weights`: all weights, or the weights of one layer; unsharded, on the CPU or without data.
    """
    return _rename(model, _round(model, _merge(model, weights), dtype))


def _merge(model: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return merge_adapters(model, weights) if has_adapters(model) else weights


def _round(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`. Weights that transformers keeps in float32 stay float32."""
    dtype_plan = model._get_dtype_plan(dtype)
    float32_names = build_glob_alternation(list(dtype_plan))[0] if dtype_plan else None
    return {
        name: weight
        if not weight.is_floating_point()
        else weight.float()
        if float32_names is not None and float32_names.search(name)
        else weight.to(dtype)
        for name, weight in weights.items()
    }


def _rename(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model by their published names."""
    # transformers records the conversions of the weights that it loads. Checkpoints of this program
    # need none, so the model of a resumed run has an empty list; None selects the default.
    if not getattr(model, "_weight_conversions", None):
        model._weight_conversions = None
    published: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return published


def _group_by_layer(
    model: Any, sizes: Mapping[str, Tensor], published: Mapping[str, Tensor]
) -> Sequence[Mapping[str, Tensor]]:
    """Return the weights in groups, one group per layer.

    `published`: the result of `_to_published` for all weights. If transformers converts weights of
    several layers together, returns all weights as a single group.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, size in sizes.items():
        layers.setdefault(_layer_prefix(name), {})[name] = size
    shapes_by_layer = {
        name: weight.shape
        for group in layers.values()
        for name, weight in _to_published(model, group, torch.float32).items()
    }
    if shapes_by_layer != {name: weight.shape for name, weight in published.items()}:
        return [sizes]  # a conversion needs weights of several layers
    return list(layers.values())


def _layer_prefix(name: str) -> str:
    """Return the part of a weight's name that all weights of its layer share.

    This part ends with the first number, or with the second word if the name has no number.
    """
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), 1)
    return ".".join(words[: number + 1])


def _meta_like(weight: Tensor) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device="meta")
