"""The hf engine: a transformers body computes hidden states, and the scoring head the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from clients.data.models.shape import rope_switch
from clients.data.tokens.tokenizer import default_template_in
from clients.teacher.query import ScoreQuery, tokenizer_fingerprint
from protos.errors import DistillError, InvalidInput, WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.base import (
    ScoringEngineInfo,
    TensorSpec,
    WeightUpdate,
    compute_fingerprint,
    with_adapters,
)
from teacher_service.engines.hf_weights import HfAdapters, ModelWeights
from teacher_service.engines.images import (
    ExpandedQuery,
    build_image_inputs,
    expand_query,
    reads_images,
)
from teacher_service.head.head import Head
from teacher_service.head.scale_and_cap import is_linear, probe_head
from teacher_service.head.stored_head import require_plain_weight
from teacher_service.models.adapters import Adapter
from teacher_service.models.device_map import OPTION, Memory, load_head_weights, log_placement
from teacher_service.models.digests import FileDigests
from teacher_service.models.files import (
    file_facts,
    model_directory,
    release_of,
    weight_files,
)
from teacher_service.models.load_progress import LoadProgress
from teacher_service.models.loading import (
    build_not_linear_error,
    find_body,
    load_image_reader,
    load_model,
    load_vocabulary,
    max_length_of,
)


class HfEngine:
    """A causal language model of transformers whose head is one linear layer.

    The model may scale or cap the logits. Sequences of a batch are padded on the right and masked.
    With `batch_invariant`, each sequence has its own forward pass, so its rows are bit-identical
    with any other sequences in the batch.

    Raises InvalidInput in three cases:

    - the model directory, the dtype or the device cannot be used
    - the logits are not one linear layer of the hidden states, scaled or capped
    - the head is quantised
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        batch_invariant: bool = False,
        adapters: Sequence[Adapter] = (),
        memory: Memory | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load the model and report the stages to `progress`. Queries may name one of `adapters`.

        - device: the device of the whole model, if `memory` is None.
        - memory: number of bytes that the model may use, by device. The layers are divided over
          these devices. The first GPU computes the layers that fit on no GPU. The head is always in
          memory.
        """
        progress = progress or LoadProgress()
        path = model_directory(model, "hf")
        self._device = _find_device(device)
        digests = FileDigests(weight_files(path))
        progress.begin("reading its weights")
        with progress.follow_transformers():
            model_on_cpu = load_model(path, dtype=dtype, with_images=True, memory=memory)
        self._divided = memory is not None
        self._model = (model_on_cpu if self._divided else model_on_cpu.to(self._device)).eval()
        if self._divided:
            log_placement(self._model)
        reader = load_image_reader(path, self._model.config)
        has_image_input = reader is not None and reads_images(
            find_body(self._model), reader, self._device
        )
        self._reader = reader if has_image_input else None
        progress.begin("probing its head")
        head = self._model.get_output_embeddings()
        quantised = getattr(self._model, "hf_quantizer", None) is not None
        # A quantised head has another class than Linear, and `require_plain_weight` refuses it.
        if not (isinstance(head, torch.nn.Linear) if quantised else is_linear(head)):
            raise build_not_linear_error(model)
        parameters = self._model.named_parameters(remove_duplicate=False)
        require_plain_weight(path, [name for name, value in parameters if value is head.weight])
        scale_and_cap = probe_head(self._model, device=self._device, max_tokens=self._max_length())
        if scale_and_cap is None:
            raise build_not_linear_error(model)
        self._head = Head(*load_head_weights(head), scale_and_cap=scale_and_cap)
        self._batch_invariant = batch_invariant
        self._rope_switch = rope_switch(self._model.config.get_text_config())
        self._weights = ModelWeights(self._model)
        self._adapters = HfAdapters(self._model, adapters)
        progress.begin("computing the digests of its files")
        self.info = with_adapters(self._describe(model, path, digests), adapters)

    def parameters(self) -> Mapping[str, TensorSpec]:
        """Return the spec of each parameter by name; a tied weight appears once.

        Raises WrongState if the weights are quantised or divided, or if there are adapters.
        """
        if self._divided:
            raise WrongState(
                "the weights of a model that is divided over devices cannot be replaced",
                hint=f"start the teacher without {OPTION}",
            )
        if getattr(self._model, "hf_quantizer", None) is not None:
            raise WrongState(
                "the weights of a quantised model cannot be replaced",
                hint="serve an unquantised checkpoint",
            )
        if self.info.adapters:
            raise WrongState(
                "the weights of a teacher with adapters cannot be replaced",
                hint="start the teacher without --adapter",
            )
        return self._weights.specs()

    def update(self, update: WeightUpdate) -> None:
        """Apply `update` in place; `info` then has the new fingerprint and version.

        Raises WrongState for an EMA update if an earlier update failed partway.
        """
        self._weights.apply(update)
        self.info = self.info.with_update(update)

    def expand_images(self, query: ScoreQuery) -> ScoreQuery:
        """Return a query with images, decoded and with all tokens that the model reads.

        Any thread may call this method. Raises InvalidInput if an image cannot be used, or if the
        sequence becomes too long.
        """
        assert self._reader is not None, "info.placeholder is None"
        return expand_query(query, self._reader, self._max_length())

    @torch.inference_mode()
    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Return one result for each query, in order.

        A query whose logits are not finite gets Corrupt. Raises WrongState if a weight update
        failed partway.
        """
        self._weights.require_intact()
        if self._batch_invariant:
            return [answer for query in queries for answer in self._score_together([query])]
        answers: dict[int, RowBlock | DistillError] = {}
        # A model that gets images reads every placeholder of the batch as an image. A model with
        # LongRoPE chooses the rotary factors of all sequences by the longest sequence. So queries
        # of different kinds are in different batches.
        kinds = [
            (query.adapter, isinstance(query, ExpandedQuery), self._has_long_factors(query))
            for query in queries
        ]
        for kind in sorted(set(kinds)):
            indices = [index for index, query_kind in enumerate(kinds) if query_kind == kind]
            rows = self._score_together([queries[index] for index in indices])
            answers |= zip(indices, rows, strict=True)
        return [answers[index] for index in range(len(queries))]

    def _score_together(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        """Score queries of one kind in one batch; see `score`."""
        self._adapters.use(queries[0].adapter)
        hidden_states = self._compute_hidden_states(queries)
        # Row t is computed from the state after tokens 0..t-1.
        states = [
            query_states[query.start - 1 : len(query.token_ids) - 1].to(self._head.weight.device)
            for query, query_states in zip(queries, hidden_states, strict=True)
        ]
        return [*self._head.score(queries, states)]

    def _compute_hidden_states(self, queries: Sequence[ScoreQuery]) -> Tensor:
        """Return the final hidden states [B, L - 1, H] of a padded batch; L is the longest length.

        State i is the state after tokens 0..i. The last token is left out: no row needs its state.
        """
        lengths = [len(query.token_ids) - 1 for query in queries]
        padded = np.zeros((len(queries), max(lengths)), dtype=np.int64)
        for row, query in enumerate(queries):
            padded[row, : lengths[row]] = query.token_ids[:-1]
        # No mask without padding: attention then takes a faster path.
        mask = None
        if min(lengths) != max(lengths):
            is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
            mask = torch.from_numpy(is_token.astype(np.int64)).to(self._device)
        token_ids = torch.from_numpy(padded).to(self._device)
        body = find_body(self._model)
        images = build_image_inputs(queries, token_ids, self._reader)
        output = body(input_ids=token_ids, attention_mask=mask, use_cache=False, **images)
        states: Tensor = output.last_hidden_state
        return states

    def _has_long_factors(self, query: ScoreQuery) -> bool:
        return self._rope_switch is not None and len(query.token_ids) - 1 > self._rope_switch

    def _max_length(self) -> int:
        return max_length_of(self._model)

    def _describe(self, model: str, path: Path, digests: FileDigests) -> ScoringEngineInfo:
        tokens = load_vocabulary(path)
        dtype = str(self._head.weight.dtype).removeprefix("torch.")
        facts = {
            **file_facts(path, digests),
            "tokenizer": tokenizer_fingerprint(tokens),
            "dtype": dtype,
            "engine": "hf",
            "device": self._device.type,
            "attention": self._model.config._attn_implementation,
            "batch_invariant": self._batch_invariant,
            "transformers": release_of(transformers.__version__),
            "torch": release_of(torch.__version__),
            **({} if self._reader is None else {"images": self._reader.facts}),
        }
        return ScoringEngineInfo(
            model=model,
            fingerprint=compute_fingerprint(facts),
            tokenizer_fingerprint=tokenizer_fingerprint(tokens),
            vocabulary=tokens,
            vocab_size=len(self._head.weight),
            max_length=self._max_length(),
            dtype=dtype,
            name="hf",
            batch_invariant=self._batch_invariant,
            placeholder=None if self._reader is None else self._reader.placeholder,
            chat_template=default_template_in(path),
        )


def _find_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # Only an allocation shows that the device exists and can be used.
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"device {name!r} is not available on this machine",
            field="--device",
            hint="use auto or cpu",
        ) from error
