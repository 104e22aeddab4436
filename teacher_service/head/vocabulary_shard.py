"""A vocabulary divided over processes: each process has the head's weights and logits of its ids.

The processes exchange only a few numbers per row, not all logits: candidates of the top-k, the
chosen logits, the largest other logit, the tail mass, and the positions of draws. Each process
computes the same rows from these numbers, so an invalid row raises the same error in every process.

Shapes: n rows, W ids of a shard, M draws per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from teacher_service.head.tail_samples import draw_at, level_below, levels_of, running_sums
from teacher_service.head.vocabulary import Vocabulary, top_ids

# Shards begin where `tail_samples` begins a group, so that R ranks draw the same ids as one rank.
_MULTIPLE = 64


@dataclass(frozen=True)
class VocabularyShard(Vocabulary):
    """The ids from `rank * width` to `(rank + 1) * width - 1` of a vocabulary of `size` ids.

    Every rank has `width` columns of logits. Columns after the last id, and columns that a request
    excludes, are -inf. Methods that take logits are collective: all ranks of the torch.distributed
    process group `group` call these methods in the same order with the same ids.
    """

    size: int
    rank: int
    ranks: int
    group: Any = field(default=None, repr=False)
    requested_size: int | None = None

    @property
    def width(self) -> int:
        """Number of columns of each rank."""
        return math.ceil(self.size / self.ranks / _MULTIPLE) * _MULTIPLE

    @property
    def ids(self) -> range:
        """The ids of the model that belong to this rank."""
        first = self.rank * self.width
        return range(min(first, self.size), min(first + self.width, self.size))

    def narrow(self, vocab_size: int | None) -> VocabularyShard:
        """Return the shard for rows over the first `vocab_size` ids; None means all ids."""
        return replace(self, requested_size=vocab_size)

    def mask_(self, logits: Tensor) -> Tensor:
        """Set logits [n, W] of ids outside the rows' vocabulary to -inf, and return them."""
        logits[:, self._count_ids(self.rank) :] = -torch.inf
        return logits

    def top(self, logits: Tensor, count: int) -> Tensor:
        """Return the ids of the `count` largest logits of each row over all ranks."""
        if count == 0:
            return top_ids(logits, 0)
        max_count, local_ids = min(count, self.width), self._count_ids(self.rank)
        local_count = min(count, local_ids)
        places = top_ids(logits[:, :local_ids], local_count)
        # float64 has every float32 and every id.
        candidates = logits.new_zeros(len(logits), 2, max_count, dtype=torch.float64)
        candidates[:, 0, :local_count] = logits.gather(-1, places)
        candidates[:, 1, :local_count] = places + self.rank * self.width
        gathered = self._all_gather(candidates)
        rank_candidates = [
            gathered[rank, :, :, : min(count, self._count_ids(rank))] for rank in range(self.ranks)
        ]
        values, ids = torch.cat(rank_candidates, dim=-1).unbind(1)
        return ids.gather(-1, values.topk(count, dim=-1).indices).long()

    def take_(self, logits: Tensor, ids: Tensor, removed: int) -> tuple[Tensor, Tensor]:
        """Return the logits of `ids` [n, c], and the largest other logit; see Vocabulary.take_."""
        places = ids - self.rank * self.width
        is_local = (places >= 0) & (places < self.width)
        places = places.clamp_(0, self.width - 1)
        # Ranks that do not have an id add 0, and a NaN stays a NaN.
        values = logits.gather(-1, places).masked_fill_(~is_local, 0)
        minus_infinity = torch.zeros_like(values[:, :removed]).masked_fill_(
            is_local[:, :removed], -torch.inf
        )
        logits.scatter_add_(-1, places[:, :removed], minus_infinity)
        gathered = self._all_gather(torch.cat([values, logits.amax(-1, keepdim=True)], dim=1))
        return gathered[:, :, :-1].sum(0), gathered[:, :, -1].amax(0)

    def sum(self, weights: Tensor) -> Tensor:
        """Return the sum [n] of the weights of all ids."""
        return self._all_gather(weights.sum(-1)).sum(0)

    def draw(self, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids [n, M] that `uniforms` select, and their weights [n, M].

        One process with the weights of all ranks would draw the same ids. Only a uniform at the
        border between two ids, within a float64 rounding error, may select the other id.
        """
        running = running_sums(weights)
        mass = running[:, -1:]
        ends = self._all_gather(mass).cumsum(0)
        end = ends[self.rank]
        start = ends[self.rank - 1] if self.rank else torch.zeros_like(end)
        levels = levels_of(uniforms, ends[-1])
        is_local = (start <= levels) & (levels < end)
        local_levels = level_below((levels - start).clamp_(min=0), mass)
        places = draw_at(weights, running, local_levels)
        ids = places + self.rank * self.width
        local_draws = torch.stack([ids.double(), weights.gather(-1, places).double()])
        sample_ids, sample_weights = self._all_gather(local_draws.masked_fill_(~is_local, 0)).sum(0)
        return sample_ids.long(), sample_weights.float()

    def _count_ids(self, rank: int) -> int:
        """Return how many ids of the rank `rank` are in the vocabulary of the rows."""
        vocab_size = (
            self.size if self.requested_size is None else min(self.requested_size, self.size)
        )
        return min(max(vocab_size - rank * self.width, 0), self.width)

    def _all_gather(self, values: Tensor) -> Tensor:
        """Return the values of every rank, [R, *shape]."""
        gathered = values.new_empty(self.ranks * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=self.group)
        return gathered.view(self.ranks, *values.shape)
