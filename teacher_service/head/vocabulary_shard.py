"""A vocabulary divided over processes: each has the head's weights of its ids, and their logits.

The processes exchange a few numbers of a row, never its logits: candidates of the top-k, the chosen
logits with the largest of the others, the mass of the rest, and the places of draws. Each computes
the same rows from them, so that an error in a row is the same error in every process.

Shapes: n rows, W ids of a shard, M draws per row, R ranks.
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

# Shards begin where `tail_samples` begins a group, so that R ranks draw what one draws.
_MULTIPLE = 64


@dataclass(frozen=True)
class VocabularyShard(Vocabulary):
    """The ids [first, first + width) of a vocabulary of `size` ids, for `rank` of `ranks`.

    Every rank has `width` columns of logits; those behind the last id, and those that a request
    leaves out, are -inf. Methods that take logits are collective: all ranks of `group`, a process
    group of torch.distributed, call them in the same order with the same ids.
    """

    size: int
    rank: int
    ranks: int
    group: Any = field(default=None, repr=False)
    asked: int | None = None

    @property
    def width(self) -> int:
        """Number of columns of each rank."""
        return math.ceil(self.size / self.ranks / _MULTIPLE) * _MULTIPLE

    @property
    def ids(self) -> range:
        """The ids of this rank that the model has."""
        first = self.rank * self.width
        return range(min(first, self.size), min(first + self.width, self.size))

    def narrowed(self, vocab_size: int | None) -> VocabularyShard:
        """Return the shard for rows about the first `vocab_size` ids; None: about all."""
        return replace(self, asked=vocab_size)

    def mask_(self, logits: Tensor) -> Tensor:
        """Set logits [n, W] of ids that no row is about to -inf, and return them."""
        logits[:, self._count(self.rank) :] = -torch.inf
        return logits

    def top(self, logits: Tensor, count: int) -> Tensor:
        """Return the ids of the `count` largest logits of each row over all ranks."""
        if count == 0:
            return top_ids(logits, 0)
        most, here = min(count, self.width), self._count(self.rank)
        mine = min(count, here)
        places = top_ids(logits[:, :here], mine)
        # float64 has every float32 and every id.
        found = logits.new_zeros(len(logits), 2, most, dtype=torch.float64)
        found[:, 0, :mine] = logits.gather(-1, places)
        found[:, 1, :mine] = places + self.rank * self.width
        every = self._of_all(found)
        kept = [every[rank, :, :, : min(count, self._count(rank))] for rank in range(self.ranks)]
        values, ids = torch.cat(kept, dim=-1).unbind(1)
        return ids.gather(-1, values.topk(count, dim=-1).indices).long()

    def take_(self, logits: Tensor, ids: Tensor, removed: int) -> tuple[Tensor, Tensor]:
        """Return the logits of `ids` [n, c], and the largest of the others; see Vocabulary."""
        places = ids - self.rank * self.width
        here = (places >= 0) & (places < self.width)
        places = places.clamp_(0, self.width - 1)
        # The other ranks add 0, and a NaN stays one.
        values = logits.gather(-1, places).masked_fill_(~here, 0)
        minus = torch.zeros_like(values[:, :removed]).masked_fill_(here[:, :removed], -torch.inf)
        logits.scatter_add_(-1, places[:, :removed], minus)
        every = self._of_all(torch.cat([values, logits.amax(-1, keepdim=True)], dim=1))
        return every[:, :, :-1].sum(0), every[:, :, -1].amax(0)

    def sum(self, weights: Tensor) -> Tensor:
        """Return the sum [n] of the weights of all ids."""
        return self._of_all(weights.sum(-1)).sum(0)

    def draw(self, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids [n, M] that `uniforms` select, and their weights [n, M].

        The ids are those that one process would draw from the weights of all ranks, but for a level
        within a rounding of float64 of the border of two ids.
        """
        running = running_sums(weights)
        mass = running[:, -1:]
        ends = self._of_all(mass).cumsum(0)
        end = ends[self.rank]
        start = ends[self.rank - 1] if self.rank else torch.zeros_like(end)
        levels = levels_of(uniforms, ends[-1])
        here = (start <= levels) & (levels < end)
        mine = level_below((levels - start).clamp_(min=0), mass)
        places = draw_at(weights, running, mine)
        ids = places + self.rank * self.width
        chosen = torch.stack([ids.double(), weights.gather(-1, places).double()])
        drawn, of_drawn = self._of_all(chosen.masked_fill_(~here, 0)).sum(0)
        return drawn.long(), of_drawn.float()

    def _count(self, rank: int) -> int:
        """Return the number of a rank's ids that rows are about."""
        asked = self.size if self.asked is None else min(self.asked, self.size)
        return min(max(asked - rank * self.width, 0), self.width)

    def _of_all(self, values: Tensor) -> Tensor:
        """Return the values of every rank, [R, *shape]."""
        every = values.new_empty(self.ranks * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(every, values.contiguous(), group=self.group)
        return every.view(self.ranks, *values.shape)
