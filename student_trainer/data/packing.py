"""Group sequences into micro-batches, and place each sequence in a line.

A layout says how the sequences of a micro-batch share its lines:

padded     One sequence a line. Lines are as long as the longest sequence of the group.
lines      Several sequences a line. Lines are as long as the longest sequence of the group: longer
           ones would cost more in attention with a dense mask than they save in padding.
one_line   All sequences in one line, without padding: for attention kernels that read only the
           tokens of each sequence (variable-length flash attention).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence

Layout = Literal["padded", "lines", "one_line"]


class _HasSequence(Protocol):
    @property
    def sequence(self) -> TokenSequence: ...


Item = TypeVar("Item", bound=_HasSequence)


def micro_batches(
    items: Sequence[Item], max_tokens: int, layout: Layout = "padded"
) -> list[list[Item]]:
    """Divide sequences into groups, each for one forward pass, in the order to run them.

    A group has at most `max_tokens` tokens, including padding, or a single sequence. Stored
    sequences, whose rows are there, come first, longest first; then rollouts, as
    `in_order_of_request` groups them. The two are never in the same group. The result depends on
    the sequences alone, never on which rows have arrived.
    """
    written = [item for item in items if isinstance(item.sequence, Rollout)]
    stored = [item for item in items if not isinstance(item.sequence, Rollout)]
    return _longest_first(stored, max_tokens, layout) + in_order_of_request(
        written, max_tokens, layout
    )


def in_order_of_request(items: Sequence[Item], max_tokens: int, layout: Layout) -> list[list[Item]]:
    """Divide sequences into groups so that the first group does not wait for the last rows.

    `items`: in the order in which their rows were requested. Sequences that share lines are divided
    in this order. Padded ones are grouped by length, because a group of mixed lengths would be
    mostly padding, and the groups are sorted by the last request among their sequences.
    """
    if layout == "padded":
        place = {id(item): number for number, item in enumerate(items)}
        groups = _longest_first(items, max_tokens, layout)
        return sorted(groups, key=lambda group: max(place[id(item)] for item in group))
    groups, waiting = [], items
    while waiting:
        count = _leading(waiting, max_tokens, layout)
        groups.append(sorted(waiting[:count], key=_length, reverse=True))
        waiting = waiting[count:]
    return groups


def places(lengths: Sequence[int], layout: Layout) -> tuple[int, list[tuple[int, int]]]:
    """Place the sequences of a group.

    Returns the tokens of a line, and (line, first position) of each sequence.
    """
    width = sum(lengths) if layout == "one_line" else max(lengths)
    found = _first_fit(lengths, width, len(lengths), layout)
    return width, [place for place in found if place]


def _longest_first(items: Sequence[Item], max_tokens: int, layout: Layout) -> list[list[Item]]:
    groups: list[list[Item]] = []
    waiting = sorted(items, key=_length, reverse=True)
    while waiting:
        width, lines = _area(_length(waiting[0]), max_tokens, layout)
        found = _first_fit([_length(item) for item in waiting], width, lines, layout)
        groups.append([i for i, place in zip(waiting, found, strict=True) if place])
        waiting = [i for i, place in zip(waiting, found, strict=True) if not place]
    return groups


def _leading(items: Sequence[_HasSequence], max_tokens: int, layout: Layout) -> int:
    """Return how many of the first sequences fit into one group, at least 1."""
    counts = range(2, len(items) + 1)
    return 1 + bisect_left(counts, True, key=lambda n: not _fits(items[:n], max_tokens, layout))


def _fits(items: Sequence[_HasSequence], max_tokens: int, layout: Layout) -> bool:
    lengths = sorted(map(_length, items), reverse=True)
    if sum(lengths) > max_tokens:
        return False
    width, lines = _area(lengths[0], max_tokens, layout)
    return None not in _first_fit(lengths, width, lines, layout)


def _area(longest: int, max_tokens: int, layout: Layout) -> tuple[int, int]:
    """Return the most tokens of a line, and the most lines, of a group."""
    if layout == "one_line":
        return max(longest, max_tokens), 1
    return longest, max(1, max_tokens // longest)


def _first_fit(
    lengths: Sequence[int], width: int, lines: int, layout: Layout
) -> list[tuple[int, int] | None]:
    """Place each sequence in the first line with room; None if none of `lines` lines has room."""
    room: list[int] = []
    found: list[tuple[int, int] | None] = []
    for length in lengths:
        line = next((number for number, left in enumerate(room) if left >= length), len(room))
        if line == lines:
            found.append(None)
            continue
        if line == len(room):
            room.append(width)
        found.append((line, width - room[line]))
        room[line] = 0 if layout == "padded" else room[line] - length
    return found


def _length(item: _HasSequence) -> int:
    return len(item.sequence.token_ids)
