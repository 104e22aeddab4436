"""The tables of the commands and programs with their options, made from the programs themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from clients.cli.app import app
from distill_server.command import app as server_app
from student_trainer.rollout_service.command import app as rollouts_app
from teacher_service.command import app as teacher_app

PROGRAMS = {
    "distill": app,
    "distill-server": server_app,
    "distill-teacher": teacher_app,
    "distill-rollouts": rollouts_app,
}
HEAD = "| argument or option | default | meaning |\n|---|---|---|\n"


def sections() -> str:
    """A section for each program and each command, with a table of what it takes."""
    parts = []
    for name, program in PROGRAMS.items():
        command = typer.main.get_command(program)
        with command.make_context(name, [], resilient_parsing=True) as context:
            parts += list(_sections(name, command, context))
    return "\n".join(parts)


def _sections(name: str, command: Any, context: Any) -> Iterator[str]:
    inner = command.list_commands(context) if hasattr(command, "list_commands") else []
    shown = [part for part in command.params if part.name not in ("help", "version")]
    records = [part.get_help_record(context) for part in shown]
    rows = "".join(_row(*record) for record in records if record)
    table = f"\n{HEAD}{rows}" if rows else ""
    if table or " " not in name:
        yield f"### {name}\n\n{' '.join(command.help.split())}\n{table}"
    for word in inner:
        one = command.get_command(context, word)
        if not one.hidden:
            yield from _sections(f"{name} {word}", one, context)


def _row(names: str, text: str) -> str:
    found = re.fullmatch(r"(?P<text>.*?)(?:\s*\[(?P<extra>[^\[\]]*)\])?", text, re.DOTALL)
    assert found is not None
    extra = (found["extra"] or "").removeprefix("default: ")
    cells = (f"`{names}`", f"`{extra}`" if extra else "", " ".join(found["text"].split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
