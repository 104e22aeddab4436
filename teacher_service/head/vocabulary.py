"""Operations on the logits of all ids: top-k, gathering, the mass of the rest, draws.

Shapes: n rows, V ids, M draws per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from teacher_service.head.tail_samples import draw

_GROUP = 64  # logits per group in the top-k search


class Vocabulary:
    """All ids of a model, in one process: every tensor of logits has a column for every id.

    The subclass `VocabularyShard` has a part of the ids, and the same methods.
    """

    def mask_(self, logits: Tensor) -> Tensor:
        """Set logits [n, V] of ids outside the rows' vocabulary to -inf, and return them."""
        return logits

    def top(self, logits: Tensor, count: int) -> Tensor:
        """Return the ids of the `count` largest logits of each row, int64, largest first."""
        return top_ids(logits, count)

    def take_(self, logits: Tensor, ids: Tensor, removed: int) -> tuple[Tensor, Tensor]:
        """Return the logits [n, c] of `ids` [n, c], and the largest logit [n] of all other ids.

        The first `removed` columns of `ids` are the head: their logits are set to -inf. All ids
        that are not in these columns are "other ids", even if they are in the remaining columns of
        `ids`.
        """
        values = logits.gather(-1, ids)
        return values, logits.scatter_(-1, ids[:, :removed], -torch.inf).amax(-1)

    def sum(self, weights: Tensor) -> Tensor:
        """Return the sum [n] of the weights [n, V] of all ids."""
        return weights.sum(-1)

    def draw(self, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids [n, M] that `uniforms` select from `weights`, and their weights [n, M].

        See `tail_samples.draw`.
        """
        sample_ids = draw(weights, uniforms)
        return sample_ids, weights.gather(-1, sample_ids)


WHOLE = Vocabulary()


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest logits of each row of [n, V], int64, in order."""
    rows, vocab_size = logits.shape
    groups = vocab_size // _GROUP
    if count == 0:
        return logits.new_empty(rows, 0, dtype=torch.int64)
    if count * _GROUP * 4 > vocab_size:
        return logits.topk(count, dim=-1).indices
    # The `count` largest logits lie in the `count` groups with the largest maxima. The ids after
    # the last complete group are always candidates.
    maxima = logits[:, : groups * _GROUP].view(rows, groups, _GROUP).amax(-1)
    top_groups = maxima.topk(count, dim=-1, sorted=False).indices
    offsets = torch.arange(_GROUP, device=logits.device)
    trailing_ids = torch.arange(groups * _GROUP, vocab_size, device=logits.device).expand(rows, -1)
    candidates = torch.cat(
        [(top_groups[:, :, None] * _GROUP + offsets).flatten(1), trailing_ids], dim=1
    )
    top_places = logits.gather(-1, candidates).topk(count, dim=-1).indices
    return candidates.gather(-1, top_places)
