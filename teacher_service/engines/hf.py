"""A transformers model: its base gives the hidden states, our head gives the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import DistillError, InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.base import EngineInfo, TensorSpec, WeightUpdate, fingerprint_of
from teacher_service.engines.hf_weights import ModelWeights
from teacher_service.head.head import Head
from teacher_service.models.files import file_facts, model_directory
from teacher_service.models.loading import load_model, load_vocabulary, not_linear

_CHECK_TOKENS = 8


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
        self._model = load_model(path, dtype=dtype).to(self._device).eval()
        head = self._model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise not_linear(model)
        self._head = Head(head.weight.detach(), None if head.bias is None else head.bias.detach())
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
        return [*self._head.score(queries, states)]

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

    @torch.inference_mode()
    def _require_linear_head(self, model: str) -> None:
        """Some models scale or cap their logits after the linear layer; our head would be silently
        wrong.
        """
        count = min(_CHECK_TOKENS, self._max_length())
        ids = (torch.arange(count, device=self._device) * 7 % len(self._head.weight))[None]
        states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = torch.nn.functional.linear(states, self._head.weight, self._head.bias).float()
        theirs = self._model(input_ids=ids, use_cache=False).logits.float()
        tolerance = 1e-4 if self._head.weight.dtype is torch.float32 else 2e-2
        # A NaN is not our subject here: it fails the sequences that meet it.
        same = ours.shape == theirs.shape and torch.allclose(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True
        )
        if not same:
            raise not_linear(model)

    def _max_length(self) -> int:
        return int(getattr(self._model.config, "max_position_embeddings", None) or 4096)

    def _describe(self, model: str, path: Path) -> EngineInfo:
        tokens = load_vocabulary(path)
        dtype = str(self._head.weight.dtype).removeprefix("torch.")
        facts = {
            **file_facts(path),
            "tokenizer": tokenizer_fingerprint(tokens),
            "dtype": dtype,
            "engine": "hf",
            "device": self._device.type,
            "attention": self._model.config._attn_implementation,
            "batch_invariant": self._batch_invariant,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        return EngineInfo(
            model=model,
            fingerprint=fingerprint_of(facts),
            tokenizer_fingerprint=tokenizer_fingerprint(tokens),
            vocabulary=tokens,
            vocab_size=len(self._head.weight),
            max_length=self._max_length(),
            dtype=dtype,
            name="hf",
            batch_invariant=self._batch_invariant,
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
