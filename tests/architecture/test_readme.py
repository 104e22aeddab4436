"""The README's commands work.

A block after the comment `<!-- test: fast -->` is run from the repository's root and must exit 0.
In every other block each `distill` command must parse: its options and arguments exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from clients.cli.app import app
from tests.architecture.reference import with_table

ROOT = Path(__file__).parents[2]
MARK = "<!-- test: fast -->"
BLOCK = re.compile(
    r"(?P<mark><!-- test: fast -->\s*\n)?^```(?P<kind>console|bash|sh)\n(?P<body>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    line: int
    fast: bool
    commands: tuple[str, ...]


def blocks_of(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        # A backslash continues a line; in a console, only what follows "$ " is typed.
        lines = found["body"].replace("\\\n", " ").splitlines()
        if found["kind"] == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        line = text.count("\n", 0, found.start("body"))
        yield Block(line, found["mark"] is not None, tuple(lines))


README = (ROOT / "README.md").read_text()
BLOCKS = list(blocks_of(README))


def parse(command: str) -> None:
    """Raises typer.TyperException when `distill` would not take it."""
    words = shlex.split(command, comments=True)
    if "distill" not in words:
        return
    words = words[words.index("distill") + 1 :]
    for end in ("|", "&&", "||", ";", ">", "&"):
        words = words[: words.index(end)] if end in words else words
    if words and words[-1] in ("--help", "-h"):
        return
    group = typer.main.get_command(app)
    with group.make_context("distill", words) as context:
        rest = [*context._protected_args, *context.args]
        while rest:
            name, inner, rest = context.command.resolve_command(context, rest)
            with inner.make_context(name, rest, parent=context) as context:
                inner_group = hasattr(inner, "resolve_command")
                rest = [*context._protected_args, *context.args] if inner_group else []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}")
def test_commands_parse(block: Block) -> None:
    for command in block.commands:
        parse(command)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.fast], ids=lambda block: f"line {block.line}"
)
def test_fast_blocks_run(block: Block, tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(block.commands)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mark_belongs_to_a_block() -> None:
    assert README.count(MARK) == sum(block.fast for block in BLOCKS)


SAMPLE = """
<!-- test: fast -->
```console
$ distill config check \\
    job.toml
job.toml: ok
```

```bash
DISTILL_SERVER=x distill --json ls --state FAILED | head  # comment
```
"""


def test_blocks() -> None:
    first, second = blocks_of(SAMPLE)
    assert (first.fast, second.fast, first.line) == (True, False, 3)
    assert [shlex.split(command) for command in first.commands] == [
        ["distill", "config", "check", "job.toml"]
    ]
    for command in (*first.commands, *second.commands):
        parse(command)


@pytest.mark.parametrize(
    "command", ["distill lss", "distill ls --lmit 3", "distill config chek x", "distill show"]
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(typer.TyperException):
        parse(command)


def test_the_reference_of_job_files_is_up_to_date() -> None:
    hint = "run python -m tests.architecture.reference"
    assert with_table(README) == README, hint
