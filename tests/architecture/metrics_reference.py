"""The tables of docs/metrics.md, from the docstring of student_trainer/run/metrics.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from student_trainer.run import metrics


def format_metrics() -> str:
    """Return each paragraph of the docstring: a table of metrics, or text."""
    assert metrics.__doc__ is not None
    _, *paragraphs = metrics.__doc__.strip().split("\n\n")
    return "\n".join(line for paragraph in paragraphs for line in _format_paragraph(paragraph))


def _format_paragraph(paragraph: str) -> Iterator[str]:
    lines = paragraph.splitlines()
    # A table has its texts in the second column; the continuation of a text is indented.
    if not all(re.match(r"\S+ {2,}\S| {10,}\S|\S+/\S+ \S", line) for line in lines):
        yield from (" ".join(lines), "")
        return
    yield from ("| metric | meaning |", "|---|---|")
    for entry in re.sub(r"\n {10,}", " ", paragraph).splitlines():
        name, meaning = entry.split(maxsplit=1)
        yield f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |"
    yield ""
