"""A transformers model: its base gives the hidden states, our head gives the rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from clients.score_query import ScoreQuery, tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput
from protos.rows import RowBlock
from teacher_service.engines.base import EngineInfo, TensorSpec, WeightUpdate, fingerprint_of
from teacher_service.engines.hf_weights import ModelWeights
from teacher_service.model_files import file_facts, model_directory
from teacher_service.scoring import score_hidden

_CHECK_TOKENS = 8
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class HfEngine:
    """Any causal language model of transformers whose head is one linear layer.

    Sequences are padded on the right and masked. With `batch_invariant` each goes alone, so that
    its rows are the same bits whatever else is in flight.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        path = model_directory(model)
        self._device = _device(device)
        self._model = _load(path, _require_dtype(dtype)).to(self._device).eval()
        head = self._model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise _not_linear(model)
        self._weight: Tensor = head.weight.detach()
        self._bias: Tensor | None = None if head.bias is None else head.bias.detach()
        self._batch_invariant = batch_invariant
        self._weights = ModelWeights(self._model)
        self._require_linear_head(model)
        self.info = self._describe(model, path)

    def parameters(self) -> Mapping[str, TensorSpec]:
        return self._weights.specs()

    def update(self, update: WeightUpdate) -> None:
        self._weights.apply(update)
        self.info = self.info.after(update)

    @torch.inference_mode()
    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        self._weights.require_intact()
        if self._batch_invariant:
            return [answer for query in queries for answer in self._score_together([query])]
        return self._score_together(queries)

    def _score_together(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        hidden = self._hidden([query.token_ids for query in queries])
        # The state that has seen tokens 0..t-1 gives row t.
        states = [
            of_one[query.start - 1 : len(query.token_ids) - 1]
            for query, of_one in zip(queries, hidden, strict=True)
        ]
        answers: dict[int, RowBlock | DistillError] = {}
        for group in _alike(queries):
            answers |= self._answers(group, queries, states)
        return [answers[index] for index in range(len(queries))]

    def _answers(
        self, group: Sequence[int], queries: Sequence[ScoreQuery], states: Sequence[Tensor]
    ) -> dict[int, RowBlock | DistillError]:
        """The group's rows in one call: short sequences spend the head's time on its calls."""
        try:
            block = self._rows([queries[i] for i in group], [states[i] for i in group])
        except Corrupt as error:
            if len(group) == 1:
                return {group[0]: error}
            # Alone, each names its own position.
            alone = [self._answers([index], queries, states) for index in group]
            return {index: answer for found in alone for index, answer in found.items()}
        ends = itertools.accumulate(queries[index].rows for index in group)
        return {
            index: block.slice(end - queries[index].rows, end)
            for index, end in zip(group, ends, strict=True)
        }

    def _hidden(self, sequences: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """Final hidden states [B, L - 1, H]: entry i has seen tokens 0..i; the last token predicts
        nothing.
        """
        lengths = [len(sequence) - 1 for sequence in sequences]
        padded = np.zeros((len(sequences), max(lengths)), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            padded[row, : lengths[row]] = sequence[:-1]
        # Without padding no mask: attention has a faster path then.
        mask = None
        if min(lengths) != max(lengths):
            seen = np.arange(max(lengths)) < np.array(lengths)[:, None]
            mask = torch.from_numpy(seen.astype(np.int64)).to(self._device)
        ids = torch.from_numpy(padded).to(self._device)
        base = self._model.base_model
        states: Tensor = base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return states

    def _rows(self, queries: Sequence[ScoreQuery], states: Sequence[Tensor]) -> RowBlock:
        """The rows of queries of one kind, one after the other; `states` [rows, H] of each."""
        targets = np.concatenate([query.token_ids[query.start :] for query in queries])
        chosen = [query.head_ids for query in queries if query.head_ids is not None]
        scored = score_hidden(
            torch.cat(list(states)),
            self._weight,
            bias=self._bias,
            token_ids=self._long(targets),
            top_k=queries[0].top_k,
            head_ids=self._long(np.concatenate(chosen)) if chosen else None,
            temperature=queries[0].temperature,
            first_position=queries[0].start,
        )
        return RowBlock(
            head_ids=scored.head_ids.to(torch.int32).cpu().numpy(),
            head_logprobs=scored.head_logprobs.cpu().numpy(),
            tail_logmass=scored.tail_logmass.cpu().numpy(),
            token_logprobs=scored.token_logprobs.cpu().numpy(),
        )

    def _long(self, ids: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)

    @torch.inference_mode()
    def _require_linear_head(self, model: str) -> None:
        """Some models scale or cap their logits after the linear layer; our head would be silently
        wrong.
        """
        count = min(_CHECK_TOKENS, self._max_length())
        ids = (torch.arange(count, device=self._device) * 7 % len(self._weight))[None]
        states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = torch.nn.functional.linear(states, self._weight, self._bias).float()
        theirs = self._model(input_ids=ids, use_cache=False).logits.float()
        tolerance = 1e-4 if self._weight.dtype is torch.float32 else 2e-2
        # A NaN is not our subject here: it fails the sequences that meet it.
        same = ours.shape == theirs.shape and torch.allclose(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True
        )
        if not same:
            raise _not_linear(model)

    def _max_length(self) -> int:
        return int(getattr(self._model.config, "max_position_embeddings", None) or 4096)

    def _describe(self, model: str, path: Path) -> EngineInfo:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _not_loaded(
                path, f"its tokenizer: {' '.join(str(error).split())[:300]}"
            ) from error
        tokens = tuple(tokenizer.convert_ids_to_tokens(i) or "" for i in range(len(tokenizer)))
        dtype = str(self._weight.dtype).removeprefix("torch.")
        facts = {
            **file_facts(path),
            "tokenizer": tokenizer_fingerprint(tokens),
            "dtype": dtype,
            "engine": "hf",
            "device": self._device.type,
            "batch_invariant": self._batch_invariant,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        return EngineInfo(
            model=model,
            fingerprint=fingerprint_of(facts),
            tokenizer_fingerprint=tokenizer_fingerprint(tokens),
            vocabulary=tokens,
            vocab_size=len(self._weight),
            max_length=self._max_length(),
            dtype=dtype,
            name="hf",
            batch_invariant=self._batch_invariant,
        )


def _alike(queries: Sequence[ScoreQuery]) -> list[list[int]]:
    """Which of the queries differ only in their tokens and head ids."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, query in enumerate(queries):
        kind = (query.k, query.head_ids is None, query.temperature)
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _load(path: Path, dtype: str) -> Any:
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _not_loaded(path, " ".join(str(error).split())[:300]) from error
    if loading["missing_keys"]:
        # transformers would fill them with random numbers and only warn.
        raise _not_loaded(path, f"it has no weights for {min(loading['missing_keys'])}")
    return model


def _not_loaded(path: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"cannot load {path}: {reason}",
        field="--model",
        hint="give a complete causal language model that this version of transformers knows",
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # A small allocation finds out what a name alone does not say.
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"there is no device {name!r} on this machine", field="--device", hint="use auto or cpu"
        ) from error


def _require_dtype(name: str) -> str:
    if name not in _DTYPES:
        raise InvalidInput(
            f"there is no dtype {name!r}", field="--dtype", hint=f"use one of {', '.join(_DTYPES)}"
        )
    return name


def _not_linear(model: str) -> InvalidInput:
    return InvalidInput(
        f"the logits of {model} are not one linear layer of its hidden states",
        field="--model",
        hint="models that scale or cap their logits (Gemma 2, Granite, Cohere) are not supported",
    )
