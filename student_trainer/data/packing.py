"""Which sequences are read in one forward pass, and where each stands."""

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
    """Cut into groups of at most `max_tokens` tokens with their padding (or of one sequence),
    longest first. What the student wrote and what was stored are never in one group.

    `pack`: sequences share lines that are as long as the longest of the group. Longer ones would
    cost attention more than the padding that they save.
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
    """(line, first token in it) of each sequence of a group; `width`: tokens of a line."""
    return [place for place in _first_fit(lengths, width, len(lengths), pack) if place]


def _first_fit(
    lengths: Sequence[int], width: int, lines: int, pack: bool
) -> list[tuple[int, int] | None]:
    """Each into the first line with room for it; None where none of `lines` has any."""
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
