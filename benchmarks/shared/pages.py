"""Writes pages of docs/ and their tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a newline at its end."""
    separator = "|---" * len(header) + "|"
    return "\n".join([format_row(header), separator, *map(format_row, rows)])


def format_row(cells: Sequence[str]) -> str:
    """Return a row of a table; an empty cell has one space."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def write_page(path: Path, text: str) -> str:
    """Write a page, with one newline at its end, and return a message."""
    path.write_text(text.rstrip() + "\n")
    return f"wrote {path}"
