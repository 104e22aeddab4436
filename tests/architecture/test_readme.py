"""The documents' commands work.

Every block of them is run by the test that its mark names, or its mark says what it needs that no
test has. In all of them each `distill` command must parse, and each target and module must exist.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from clients.cli.app import move_global_options
from tests.architecture.command_reference import PROGRAMS
from tests.architecture.reference import PAGES, insert_reference
from tests.documents import DOCUMENTS, ROOT, TYPED, Block, blocks, blocks_in

# Allowed values of `needs` marks.
NEEDS = {
    "a cluster",
    "docker",
    "gpu",
    "hub",
    "root",
    "three minutes",
    "a quarter of an hour",
    "half an hour",
}
BLOCKS = [
    block
    for document in DOCUMENTS
    for block in blocks_in((ROOT / document).read_text(), document)
    if block.kind in TYPED
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def parse_command(command: str) -> None:
    """Raise typer.TyperException if `distill` refuses the command, LookupError for an unknown make
    target or module.
    """
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(command, comments=True)]
    for end in ("|", "&&", "||", ";", ">", "&"):
        if end in words:
            parse_command(shlex.join(words[words.index(end) + 1 :]))
            words = words[: words.index(end)]
    if words[:1] == ["make"] and words[1] not in TARGETS:
        raise LookupError(f"make {words[1]}")
    if words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is None:
        raise LookupError(words[2])
    while words and re.match(r"\w+=", words[0]):
        del words[0]
    if words and words[0] in PROGRAMS:
        parse_distill_command(words[0], words[1:])


def parse_distill_command(program: str, words: list[str]) -> None:
    if words and words[-1] in ("--help", "-h"):
        return
    if program == "distill":
        words = move_global_options(words)
    group = typer.main.get_command(PROGRAMS[program])
    with group.make_context(program, words) as context:
        if not hasattr(context.command, "resolve_command"):
            return
        remaining_words = [*context._protected_args, *context.args]
        while remaining_words:
            name, subcommand, remaining_words = context.command.resolve_command(
                context, remaining_words
            )
            with subcommand.make_context(name, remaining_words, parent=context) as context:
                is_group = hasattr(subcommand, "resolve_command")
                remaining_words = [*context._protected_args, *context.args] if is_group else []


def block_name(block: Block) -> str:
    return f"{block.document}:{block.line}"


@pytest.mark.parametrize("block", BLOCKS, ids=block_name)
def test_commands_parse(block: Block) -> None:
    for command in block.commands:
        parse_command(command)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_within_sentences_exist(document: str) -> None:
    """Commands and options exist; arguments may be left out."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:distill[a-z-]*|make|python -m) [^`]*)`", text):
        if "--install-completion" in command:
            continue  # --install-completion would change the user's shell
        error_text = ""
        try:
            parse_command(" ".join(command.replace("...", "").split()))
        except typer.TyperException as error:
            error_text = error.format_message()
        assert "No such" not in error_text, command


def test_every_block_is_run_or_says_what_it_needs() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for block in BLOCKS:
        runs = f'blocks("{block.document}", "{block.test}")'
        assert bool(block.test) != bool(block.needs), f"{block_name(block)} has no mark"
        assert not block.test or runs in tests, f"{block_name(block)}: no test runs it"
        assert set(filter(None, block.needs.split(", "))) <= NEEDS, block_name(block)


def test_every_fence_is_a_block_that_was_looked_at() -> None:
    """A misspelt mark, or a block inside a list, would be ignored otherwise."""
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        fences = re.findall(r"^ *```\w+$", text, re.MULTILINE)
        found_blocks = list(blocks_in(text, document))
        assert len(fences) == len(found_blocks), document
        marks = re.findall(r"<!-- (?:test|needs)\b", text)
        assert len(marks) == sum(bool(block.test or block.needs) for block in found_blocks), (
            document
        )
        unmarked_commands = re.findall(r"^```\n(?:\$ |distill|make)", text, re.MULTILINE)
        assert not unmarked_commands, f"{document}: commands in a block without a language"


@pytest.mark.parametrize("block", blocks("docs/operations.md", "fast"), ids=block_name)
def test_fast_blocks_run(block: Block, tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    process = subprocess.run(
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
    assert process.returncode == 0, process.stdout + process.stderr


SAMPLE = """
<!-- test: fast -->
```console
$ distill config check \\
    job.toml
job.toml: ok
```

<!-- needs: gpu, hub -->
```bash
DISTILL_SERVER=x distill --json ls --state FAILED | head  # comment
```
"""


def test_blocks() -> None:
    first_block, second_block = blocks_in(SAMPLE, "SAMPLE")
    assert (first_block.test, second_block.needs, first_block.line) == ("fast", "gpu, hub", 3)
    assert [shlex.split(command) for command in first_block.commands] == [
        ["distill", "config", "check", "job.toml"]
    ]
    for command in (*first_block.commands, *second_block.commands):
        parse_command(command)


@pytest.mark.parametrize(
    "command",
    [
        *("distill lss", "distill ls --lmit 3", "distill config chek x", "distill show"),
        *("distill-teacher --modle x", "distill-server --port many"),
        "distill-rollouts --engin vllm",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    for full_command in (command, f".venv/bin/{command}", f"true && {command}"):
        with pytest.raises(typer.TyperException):
            parse_command(full_command)


@pytest.mark.parametrize("command", ["make dmo", "python -m benchmarks.los", "true ; make dmo"])
def test_what_is_not_there_is_found(command: str) -> None:
    with pytest.raises(LookupError):
        parse_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_reference_is_up_to_date(page: Path) -> None:
    hint = "run python -m tests.architecture.reference"
    text = page.read_text()
    assert insert_reference(text, PAGES[page]()) == text, hint
