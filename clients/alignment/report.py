"""How well two tokenizers fit on given texts: the share of tokens that are one token of both."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from clients.alignment.alignment import Aligner

# Characters by which `kind_of` tells the kind of a text.
_OTHER_LETTERS = re.compile(r"[^\W\d_\u0000-\u024f]")
_FIGURES = re.compile(r"[0-9+*/=^$\\%]")
_BRACKETS = re.compile(r"[{}()\[\];<>_#]")


@dataclass(frozen=True)
class Shares:
    """Figures of texts: tokens of the student, and shares of them or of the texts.

    one_to_one: of tokens that are one token of the teacher. left_out: of texts that cannot be
    aligned, because the teacher's normalization changes them.
    """

    texts: int
    tokens: int
    one_to_one: float
    left_out: float


def measure_shares(aligner: Aligner, texts: Iterable[str]) -> Shares:
    """Encode texts with the student's tokenizer and align them with the teacher's."""
    count = tokens = single = left_out = 0
    for text in texts:
        ids = aligner.writer.encode(text)
        if not len(ids):
            continue
        count += 1
        alignment = aligner.align(ids, has_end=False)
        left_out += alignment is None
        tokens += len(ids)
        single += 0 if alignment is None else int(alignment.one_to_one.sum())
    return Shares(count, tokens, single / max(tokens, 1), left_out / max(count, 1))


def kind_of(text: str) -> str:
    """Return `other scripts`, `code`, `maths` or `prose`, from the shares of characters."""
    length = max(len(text), 1)
    if len(_OTHER_LETTERS.findall(text)) > 0.3 * length:
        return "other scripts"
    if len(_BRACKETS.findall(text)) > 0.06 * length:
        return "code"
    return "maths" if len(_FIGURES.findall(text)) > 0.06 * length else "prose"
