"""The head of a model, applied to many queries; queries with the same settings share one call.

Shapes: H hidden size, V vocabulary size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock
from teacher_service.head.scale_and_cap import PLAIN, ScaleAndCap
from teacher_service.head.scoring import score_hidden
from teacher_service.head.uniforms import uniforms_of
from teacher_service.head.vocabulary import WHOLE, Vocabulary
from teacher_service.head.vocabulary_shard import VocabularyShard


class Head:
    """One linear layer: `weight` [V, H] and `bias` [V], on the device of the hidden states.

    - product: an optional function that computes hidden @ weight.T faster.
    - scale_and_cap: how the products become logits.
    - shard: the part of the vocabulary that `weight` and `bias` cover, if several processes share
      the head. All processes must then call `score` together (a collective call).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[[Tensor], Tensor] | None = None,
        scale_and_cap: ScaleAndCap = PLAIN,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._product = product
        self._scale_and_cap = scale_and_cap
        self._shard = shard

    def score(
        self, queries: Sequence[ScoreQuery], states: Sequence[Tensor]
    ) -> list[RowBlock | Corrupt]:
        """Return the rows of each query, in order; Corrupt if its logits are not finite.

        `states` has one tensor [rows, H] per query. Row t is computed from the state after
        tokens 0..t-1.
        """
        answers: dict[int, RowBlock | Corrupt] = {}
        for group in _group_by_settings(queries):
            answers |= self._score_group(group, queries, states)
        return [answers[index] for index in range(len(queries))]

    def _score_group(
        self, group: Sequence[int], queries: Sequence[ScoreQuery], states: Sequence[Tensor]
    ) -> dict[int, RowBlock | Corrupt]:
        """Score the queries with the indices `group` in one call; return the answers by index.

        For short sequences, the overhead of a call takes most of the time.
        """
        try:
            block = self._compute_rows([queries[i] for i in group], [states[i] for i in group])
        except Corrupt as error:
            if len(group) == 1:
                return {group[0]: error}
            # Score each query alone: the error then names the query and its own position.
            single_answers = [self._score_group([index], queries, states) for index in group]
            return {
                index: answer for answers in single_answers for index, answer in answers.items()
            }
        ends = itertools.accumulate(queries[index].rows for index in group)
        return {
            index: block.slice(end - queries[index].rows, end)
            for index, end in zip(group, ends, strict=True)
        }

    def _compute_rows(self, queries: Sequence[ScoreQuery], states: Sequence[Tensor]) -> RowBlock:
        """Return the concatenated rows of queries with the same settings."""
        target_ids = np.concatenate([query.token_ids[query.start :] for query in queries])
        head_ids = [query.head_ids for query in queries if query.head_ids is not None]
        draw_ids = [query.draw_ids for query in queries if query.draw_ids is not None]
        uniforms = None
        if queries[0].tail_samples:
            uniform_values = np.concatenate([uniforms_of(query) for query in queries])
            uniforms = torch.from_numpy(uniform_values).to(self.weight.device)
        weight, bias, product, vocabulary = self._narrow_head(queries[0].vocab_size)
        scored_rows = score_hidden(
            torch.cat(list(states)),
            weight,
            bias=bias,
            product=product,
            scale_and_cap=self._scale_and_cap,
            token_ids=self._to_device(target_ids),
            top_k=queries[0].top_k,
            head_ids=self._to_device(np.concatenate(head_ids)) if head_ids else None,
            temperature=queries[0].temperature,
            uniforms=uniforms,
            draw_ids=self._to_device(np.concatenate(draw_ids)) if draw_ids else None,
            first_position=queries[0].start,
            vocabulary=vocabulary,
        )
        return RowBlock(
            head_ids=scored_rows.head_ids.to(torch.int32).cpu().numpy(),
            head_logprobs=scored_rows.head_logprobs.cpu().numpy(),
            tail_logmass=scored_rows.tail_logmass.cpu().numpy(),
            token_logprobs=scored_rows.token_logprobs.cpu().numpy(),
            tail_sample_ids=_to_numpy(scored_rows.sample_ids, torch.int32),
            tail_sample_logprob=_to_numpy(scored_rows.sample_logprob, torch.float32),
            draw_logprobs=_to_numpy(scored_rows.draw_logprobs, torch.float32),
        )

    def _narrow_head(
        self, vocab_size: int | None
    ) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor] | None, Vocabulary]:
        """Return views of weight, bias and product for the first `vocab_size` ids, and the ids.

        A shard keeps all its weights, so that the ranks have the same shapes.
        """
        if self._shard is not None:
            return self.weight, self.bias, self._product, self._shard.narrow(vocab_size)
        product = self._product
        if product is not None and vocab_size is not None:
            product = partial(_compute_first_columns, product, vocab_size)
        bias = None if self.bias is None else self.bias[:vocab_size]
        return self.weight[:vocab_size], bias, product, WHOLE

    def _to_device(self, ids: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.weight.device)


def _compute_first_columns(
    product: Callable[[Tensor], Tensor], count: int, states: Tensor
) -> Tensor:
    return product(states)[:, :count]


def _to_numpy(column: Tensor | None, dtype: torch.dtype) -> NDArray[Any] | None:
    return None if column is None else column.to(dtype).cpu().numpy()


def _group_by_settings(queries: Sequence[ScoreQuery]) -> list[list[int]]:
    """Group the indices of queries that differ only in tokens, chosen ids and seeds."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, query in enumerate(queries):
        id_settings = (query.k, query.head_ids is None, query.tail_draws)
        settings = (*id_settings, query.temperature, query.tail_samples, query.vocab_size)
        groups.setdefault(settings, []).append(index)
    return list(groups.values())
