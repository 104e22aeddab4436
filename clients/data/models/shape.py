"""The sizes of a dense decoder model (Llama, Mistral, Qwen2, Qwen3), read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clients.data.hub import hub_error, use_caches_if_away
from clients.data.models.files import read_object
from clients.data.outside import read_document
from protos.errors import InvalidInput

FIELD = "student.model"
# The layers of these architectures have the same linear modules. Qwen2 always has biases on the
# projections of queries, keys and values; Qwen3 has norms of the queries and keys of a head.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder whose layers have attention and a gated MLP.

    - layers: number of layers.
    - hidden: width of the residual stream.
    - intermediate: width of the MLP.
    - heads, kv_heads: number of query heads, and of key and value heads.
    - head_dim: width of a head.
    - vocabulary: number of logits.
    - tied: whether the head shares the weights of the embeddings.
    - query_norm: whether the queries and keys of a head have norms.
    - query_bias, output_bias, mlp_bias: whether these linear modules have biases.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    query_norm: bool = False
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def queries(self) -> int:
        """Total width of the query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Total width of the key heads. The value heads have the same total width."""
        return self.kv_heads * self.head_dim

    @property
    def linear_modules(self) -> list[tuple[int, int]]:
        """(input width, output width) of each linear module of a layer."""
        attention = [self.queries, self.keys, self.keys]
        return [
            *((self.hidden, out) for out in attention),
            (self.queries, self.hidden),
            *[(self.hidden, self.intermediate)] * 2,
            (self.intermediate, self.hidden),
        ]

    @property
    def linear_weights(self) -> int:
        """Number of weights of the linear modules of a layer, without biases."""
        return sum(inside * out for inside, out in self.linear_modules)

    @property
    def other_weights(self) -> int:
        """Number of weights of a layer outside its matrices: norms and biases."""
        norms = 2 * self.hidden + 2 * self.head_dim * self.query_norm
        biases = self.query_bias * (self.queries + 2 * self.keys) + self.output_bias * self.hidden
        return norms + biases + self.mlp_bias * (2 * self.intermediate + self.hidden)

    @property
    def table_weights(self) -> int:
        """Number of weights of the embeddings. A separate head has the same number."""
        return self.vocabulary * self.hidden

    @property
    def root_weights(self) -> int:
        """Number of weights outside the layers: embeddings, head and last norm."""
        return self.table_weights * (1 if self.tied else 2) + self.hidden

    @property
    def weights(self) -> int:
        """Number of all weights. Weights that embeddings and head share are counted once."""
        return self.layers * (self.linear_weights + self.other_weights) + self.root_weights


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes in a config.json.

    Raises InvalidInput (`student.model`) for another architecture, or if a size is missing or not
    positive.
    """
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise InvalidInput(
            f"the sizes of a model of type {model_type!r} are not known",
            field=FIELD,
            hint=f"known are {', '.join(_MODEL_TYPES)}",
        )
    try:
        hidden, heads = _read_size(config, "hidden_size"), _read_size(config, "num_attention_heads")
        has_projection_bias = model_type == "qwen2" or bool(config.get("attention_bias"))
        return ModelShape(
            layers=_read_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_read_size(config, "intermediate_size"),
            heads=heads,
            kv_heads=_read_size(config, "num_key_value_heads", heads),
            head_dim=_read_size(config, "head_dim", hidden // heads),
            vocabulary=_read_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            query_norm=model_type == "qwen3",
            query_bias=has_projection_bias,
            output_bias=has_projection_bias and model_type != "qwen2",
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias")),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"config.json lacks a size, or a size is not a positive number: {error}",
            field=FIELD,
            hint="restore the file",
        ) from error


def _read_size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a size. Raises KeyError if it is missing without a default, ValueError below 1."""
    value = config[name] if default is None else config.get(name)
    size = int(value) if value is not None else default
    if size is None or size < 1:
        raise ValueError(f"{name} is {value}")
    return size


def logits_in(model: Path) -> int | None:
    """Return the number of logits in the config.json of a directory; None if it cannot be read."""
    try:
        config = read_document(model / "config.json")
        vocab_size = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return vocab_size if isinstance(vocab_size, int) else None


# What architectures call the context in config.json.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "context_length",
)


def context_of(model: str, revision: str | None = None) -> int | None:
    """Return the context of a model from its config.json: the most tokens that the model reads.

    `model`: a directory or a hub id. For a model with LongRoPE, the result is the number of tokens
    up to which the rotary factors stay the same; see `rope_switch`. Returns None if the file does
    not contain the number, or cannot be read. Raises Unavailable as `config_file` does.
    """
    try:
        config = read_object(config_file(model, revision), FIELD)
    except InvalidInput:
        return None
    text_config = config.get("text_config")
    shape = text_config if isinstance(text_config, dict) else config
    values = [shape.get(key) for key in _CONTEXT_KEYS]
    lengths = [value for value in values if isinstance(value, int) and value > 0][:1]
    switch = rope_switch(SimpleNamespace(rope_parameters=_rope_parameters(shape)))
    return min([*lengths, *([] if switch is None else [switch])], default=None)


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rotary parameters in a config.json. Earlier versions call them rope_scaling."""
    scaling = config.get("rope_scaling")
    if isinstance(config.get("rope_parameters"), dict) or not isinstance(scaling, dict):
        return config.get("rope_parameters")
    length = "original_max_position_embeddings"
    return {"rope_type": scaling.get("type"), length: config.get(length), **scaling}


def config_file(model: str, revision: str | None = None) -> Path:
    """Return the path of the config.json of a directory or a hub id.

    For a hub id, the file is downloaded. Raises InvalidInput (`student.model`) if there is no
    config.json, and Unavailable if the hub does not answer and the file is not in its cache.
    """
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(
                f"{model} has no config.json", field=FIELD, hint="give a Hugging Face directory"
            )
        return path / "config.json"
    use_caches_if_away()
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise InvalidInput(
            f"{model!r} is not a directory, and huggingface_hub, which loads from the hub, is"
            f" not installed",
            field=FIELD,
            hint="give a Hugging Face directory, or install the extra `train`",
        ) from error
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (OSError, ValueError) as error:
        raise hub_error(
            error,
            f"no config.json of {model!r}: {str(error).strip().splitlines()[0].rstrip('.')}",
            field=FIELD,
            hint="give a Hugging Face directory or reachable hub id",
        ) from error


def read_shape(model: str, revision: str | None = None) -> tuple[ModelShape, Path]:
    """Return (sizes of a model, directory of its config.json). Raises errors of `config_file`."""
    file = config_file(model, revision)
    return shape_of(read_object(file, FIELD)), file.parent


def rope_switch(config: Any) -> int | None:
    """Return the largest number of tokens for which a model uses its short rotary factors.

    A model with LongRoPE (Ding et al., arXiv 2402.13753), such as Phi-3.5, has two sets of rotary
    factors; longer sequences use the long factors. transformers chooses one set for a whole batch,
    by the longest sequence of the batch. vLLM chooses one set by the longest sequence that it
    accepts.

    `config`: the configuration of the text model, as transformers loads it. Returns None if the
    factors do not depend on the length: the model has no LongRoPE, or its two sets are equal.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_parameters = [value for value in parameters.values() if isinstance(value, Mapping)]
    switches = [
        int(rope["original_max_position_embeddings"])
        for rope in layer_parameters or [parameters]
        if rope.get("rope_type") == "longrope" and _has_two_sets(rope)
    ]
    return min(switches, default=None)


def _has_two_sets(rope: Mapping[str, Any]) -> bool:
    return any(
        rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in ("factor", "mscale")
    )
