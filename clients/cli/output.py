"""The output of all commands. Results go to stdout; progress, messages and errors go to stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from protos.errors import DistillError
from protos.program.logs import escape_controls

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Output:
    """The output settings of a command, and methods that print according to these settings."""

    as_json: bool = False
    """Print results and errors as JSON."""
    quiet: bool = False
    """Print no progress and no messages."""
    verbose: bool = False
    """Also print details."""
    color: bool = True
    """Allow colors on a terminal."""

    def result(self, record: Mapping[str, Any], text: str) -> None:
        """Print the result of a command: `record` with --json, else `text`."""
        print(json.dumps(record) if self.as_json else text, flush=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Print a table with a row for each element of `rows`.

        With --json: one object that has the list `rows` under the key `name`, with all keys of each
        row. Otherwise: aligned text with only the columns in `columns`. If a terminal is too
        narrow, some columns are left out and long cells are cut (see `table_lines`). `distill show`
        prints all values of a job.
        """
        if self.as_json:
            print(json.dumps({name: list(rows)}))
            return
        from clients.jobs.display.tables import OPTIONAL_COLUMNS, table_lines

        max_width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for text in table_lines(columns, rows, max_width, OPTIONAL_COLUMNS):
            print(text)

    def say(self, sentence: str) -> None:
        """Print a message to stderr. Print nothing if `quiet`."""
        if not self.quiet:
            print(escape_controls(sentence), file=sys.stderr, flush=True)

    def detail(self, sentence: str) -> None:
        """Print a message to stderr if `verbose`."""
        if self.verbose:
            print(sentence, file=sys.stderr, flush=True)

    def fail(self, error: DistillError) -> None:
        """Print an error to stderr: as a sentence, or with --json as `{"error": {...}}`."""
        if self.as_json:
            record = {
                "code": error.code.value,
                "message": error.message,
                "field": error.field,
                "hint": error.hint,
            }
            print(json.dumps({"error": record}), file=sys.stderr)
            return
        red = self.color and sys.stderr.isatty()
        label = "\033[1;31merror:\033[0m" if red else "error:"
        print(f"{label} {escape_controls(str(error))}", file=sys.stderr)

    @property
    def live(self) -> bool:
        """True if progress may be redrawn in place: stderr is a terminal and `quiet` is false."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not self.quiet

    def for_people(self) -> Output:
        """Return a copy that prints text even with --json, for progress before a JSON result."""
        return replace(self, as_json=False)

    def console(self, *, stderr: bool = True) -> Console:
        """Return a rich console for stderr, or for stdout. It uses colors as the settings say."""
        from rich.console import Console

        return Console(stderr=stderr, no_color=not self.color, highlight=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print `title` before a long operation: with a spinner on a terminal, otherwise as one
        line.
        """
        if not self.live:
            self.say(f"{title} ...")
            yield
            return
        with self.console().status(f"{title} ..."):
            yield
        self.say(f"{title}: done")
