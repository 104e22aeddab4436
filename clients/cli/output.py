"""The one place that writes: results go to stdout, progress and talk to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from protos.errors import DistillError

if TYPE_CHECKING:
    from rich.console import Console


def plain(text: str) -> str:
    """One line without control characters: what a job says must not drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class Output:
    """How to talk to whoever called. `as_json`: results, and errors, are for a program."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: bool = True

    def result(self, record: Mapping[str, Any], text: str) -> None:
        """The answer of a command: `record` to a program, `text` to a person."""
        print(json.dumps(record) if self.as_json else text, flush=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> None:
        """`rows` under their keys; a person gets those of `shown`, aligned and never cut."""
        if self.as_json:
            print(json.dumps({name: list(rows)}))
            return
        lines = [[column.upper() for column in shown]]
        lines += [[plain(str(row[column])) for column in shown] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())

    def say(self, sentence: str) -> None:
        if not self.quiet:
            print(sentence, file=sys.stderr, flush=True)

    def detail(self, sentence: str) -> None:
        """Only told with -v."""
        if self.verbose:
            print(sentence, file=sys.stderr, flush=True)

    def fail(self, error: DistillError) -> None:
        if self.as_json:
            told = {
                "code": error.code.value,
                "message": error.message,
                "field": error.field,
                "hint": error.hint,
            }
            print(json.dumps({"error": told}), file=sys.stderr)
            return
        red = self.color and sys.stderr.isatty()
        label = "\033[1;31merror:\033[0m" if red else "error:"
        print(f"{label} {error}", file=sys.stderr)

    @property
    def live(self) -> bool:
        """Whether progress may be redrawn in place."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not self.quiet

    def for_people(self) -> Output:
        """The same, but progress stays text even when results are JSON."""
        return replace(self, as_json=False)

    def console(self, *, stderr: bool = True) -> Console:
        from rich.console import Console

        return Console(stderr=stderr, no_color=not self.color, highlight=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A long step without numbers: a spinner, or a line when it begins."""
        if not self.live:
            self.say(f"{title} ...")
            yield
            return
        with self.console().status(f"{title} ..."):
            yield
        self.say(f"{title}: done")
