"""Runs commands in one process, which tests/other_system.py gives another system: COMMANDS.json.

Prints [[exit code, output], ...] as JSON. `["--help"]` runs the help of every command.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import typer

from clients.cli.app import app, main


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, from the parser."""
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if path and not hasattr(command, "commands"):
        yield path


def all_commands() -> list[tuple[str, ...]]:
    return list(leaves(typer.main.get_command(app)))


def run(words: list[str]) -> tuple[int, str]:
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding, write_through=True) as stream:
        with redirect_stdout(stream), redirect_stderr(stream):
            try:
                code = main(words)
            except SystemExit as end:
                code = int(end.code or 0)
        return code, raw.getvalue().decode()


if __name__ == "__main__":
    results = []
    for words in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        if words == ["--help"]:
            codes = {run([*command, "--help"])[0] for command in all_commands()}
            results.append((max(codes), ""))
        else:
            results.append(run(words))
    print(json.dumps(results))
