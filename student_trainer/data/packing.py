"""Groups sequences into micro-batches, and places each sequence in a line.

A layout determines how the sequences of a micro-batch are placed in lines:

- padded: one sequence per line. Lines are as long as the longest sequence of the group.
- lines: several sequences per line. Lines are as long as the longest sequence of the group. Longer
  lines would save padding, but with a dense mask the attention would cost more than they save.
- one_line: all sequences in one line, without padding. The attention kernel must read only the
  tokens of each sequence (variable-length flash attention).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from student_trainer.data.sequence import Rollout, TokenSequence

Layout = Literal["padded", "lines", "one_line"]


class _HasSequence(Protocol):
    @property
    def sequence(self) -> TokenSequence: ...


Item = TypeVar("Item", bound=_HasSequence)


def micro_batches(
    items: Sequence[Item], max_tokens: int, layout: Layout = "padded"
) -> list[list[Item]]:
    """Divide sequences into groups, one group per forward pass, in the order to run them.

    A group has either at most `max_tokens` tokens, including padding, or a single longer sequence.
    A group has only stored sequences or only rollouts:

    - Stored sequences come first, longest first, because their rows are already available.
    - Rollouts follow, grouped by `group_in_request_order`.

    The result depends only on the sequences. It does not depend on which rows have arrived.
    """
    rollouts = [item for item in items if isinstance(item.sequence, Rollout)]
    stored_sequences = [item for item in items if not isinstance(item.sequence, Rollout)]
    return _group_longest_first(stored_sequences, max_tokens, layout) + group_in_request_order(
        rollouts, max_tokens, layout
    )


def group_in_request_order(
    items: Sequence[Item], max_tokens: int, layout: Layout
) -> list[list[Item]]:
    """Divide sequences into groups so that the rows of the first group arrive early.

    `items` are in the order in which their rows were requested. With the layouts `lines` and
    `one_line`, the sequences are divided in this order. With the layout `padded`, sequences of
    similar length form a group, because a group of mixed lengths would be mostly padding. These
    groups are sorted by the latest request in each group.
    """
    if layout == "padded":
        request_number = {id(item): number for number, item in enumerate(items)}
        groups = _group_longest_first(items, max_tokens, layout)
        return sorted(groups, key=lambda group: max(request_number[id(item)] for item in group))
    groups, remaining = [], items
    while remaining:
        count = _count_leading(remaining, max_tokens, layout)
        groups.append(sorted(remaining[:count], key=_count_tokens, reverse=True))
        remaining = remaining[count:]
    return groups


def place_sequences(lengths: Sequence[int], layout: Layout) -> tuple[int, list[tuple[int, int]]]:
    """Place the sequences of a group in lines.

    Returns the length of a line in tokens, and (line, first position) for each sequence.
    """
    width = sum(lengths) if layout == "one_line" else max(lengths)
    placements = _first_fit(lengths, width, len(lengths), layout)
    return width, [placement for placement in placements if placement]


def _group_longest_first(
    items: Sequence[Item], max_tokens: int, layout: Layout
) -> list[list[Item]]:
    groups: list[list[Item]] = []
    remaining = sorted(items, key=_count_tokens, reverse=True)
    while remaining:
        width, lines = _group_shape(_count_tokens(remaining[0]), max_tokens, layout)
        placements = _first_fit([_count_tokens(item) for item in remaining], width, lines, layout)
        groups.append(
            [item for item, placement in zip(remaining, placements, strict=True) if placement]
        )
        remaining = [
            item for item, placement in zip(remaining, placements, strict=True) if not placement
        ]
    return groups


def _count_leading(items: Sequence[_HasSequence], max_tokens: int, layout: Layout) -> int:
    """Return how many sequences, from the first on, fit into one group; at least 1."""
    counts = range(2, len(items) + 1)
    return 1 + bisect_left(counts, True, key=lambda n: not _fits(items[:n], max_tokens, layout))


def _fits(items: Sequence[_HasSequence], max_tokens: int, layout: Layout) -> bool:
    lengths = sorted(map(_count_tokens, items), reverse=True)
    if sum(lengths) > max_tokens:
        return False
    width, lines = _group_shape(lengths[0], max_tokens, layout)
    return None not in _first_fit(lengths, width, lines, layout)


def _group_shape(longest: int, max_tokens: int, layout: Layout) -> tuple[int, int]:
    """Return the limits of a group: the number of tokens per line, and the number of lines."""
    if layout == "one_line":
        return max(longest, max_tokens), 1
    return longest, max(1, max_tokens // longest)


def _first_fit(
    lengths: Sequence[int], width: int, lines: int, layout: Layout
) -> list[tuple[int, int] | None]:
    """Return (line, first position) for each sequence; None for a sequence that does not fit.

    A sequence is placed in the first line with enough room. There are at most `lines` lines of
    `width` tokens.
    """
    free_tokens: list[int] = []
    placements: list[tuple[int, int] | None] = []
    for length in lengths:
        line = next(
            (number for number, free in enumerate(free_tokens) if free >= length), len(free_tokens)
        )
        if line == lines:
            placements.append(None)
            continue
        if line == len(free_tokens):
            free_tokens.append(width)
        placements.append((line, width - free_tokens[line]))
        free_tokens[line] = 0 if layout == "padded" else free_tokens[line] - length
    return placements


def _count_tokens(item: _HasSequence) -> int:
    return len(item.sequence.token_ids)
