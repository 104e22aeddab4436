"""Group sequences into micro-batches, and place each sequence in a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from student_trainer.data.rollout import Rollout
from student_trainer.data.sequence import TokenSequence


class _HasSequence(Protocol):
    @property
    def sequence(self) -> TokenSequence: ...


Item = TypeVar("Item", bound=_HasSequence)


def micro_batches(
    items: Sequence[Item], max_tokens: int, *, pack: bool = False
) -> list[list[Item]]:
    """Divide sequences into groups, longest first, each for one forward pass.

    A group has at most `max_tokens` tokens, including padding, or a single sequence. Sampled
    sequences (rollouts) and stored ones are never in the same group.

    `pack`: sequences share lines, which are as long as the longest sequence of the group. Longer
    lines would cost more in attention than they save in padding.
    """
    groups: list[list[Item]] = []
    written = [item for item in items if isinstance(item.sequence, Rollout)]
    stored = [item for item in items if not isinstance(item.sequence, Rollout)]
    for alike in (written, stored):
        waiting = sorted(alike, key=_length, reverse=True)
        while waiting:
            width = _length(waiting[0])
            lines = max(1, max_tokens // width)
            found = _first_fit([_length(item) for item in waiting], width, lines, pack)
            groups.append([i for i, place in zip(waiting, found, strict=True) if place])
            waiting = [i for i, place in zip(waiting, found, strict=True) if not place]
    return groups


def places(lengths: Sequence[int], width: int, *, pack: bool) -> list[tuple[int, int]]:
    """Return (line, first position) of each sequence of a group. `width`: tokens of a line."""
    return [place for place in _first_fit(lengths, width, len(lengths), pack) if place]


def _first_fit(
    lengths: Sequence[int], width: int, lines: int, pack: bool
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
        room[line] = room[line] - length if pack else 0
    return found


def _length(item: _HasSequence) -> int:
    return len(item.sequence.token_ids)
