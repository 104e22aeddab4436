"""Tables of the options of all commands and programs, generated from their definitions."""

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


def format_sections() -> str:
    """Return a section for each program and each command, with a table of its options."""
    command_sections = []
    for name, program in PROGRAMS.items():
        command = typer.main.get_command(program)
        with command.make_context(name, [], resilient_parsing=True) as context:
            command_sections += list(_format_command_sections(name, command, context))
    return "\n".join(command_sections)


def _format_command_sections(name: str, command: Any, context: Any) -> Iterator[str]:
    subcommand_names = command.list_commands(context) if hasattr(command, "list_commands") else []
    parameters = [
        parameter for parameter in command.params if parameter.name not in ("help", "version")
    ]
    records = [parameter.get_help_record(context) for parameter in parameters]
    rows = "".join(_format_row(*record) for record in records if record)
    table = f"\n{HEAD}{rows}" if rows else ""
    if table or " " not in name or not subcommand_names:
        yield f"### {name}\n\n{' '.join(command.help.split())}\n{table}"
    for subcommand_name in subcommand_names:
        subcommand = command.get_command(context, subcommand_name)
        if not subcommand.hidden:
            yield from _format_command_sections(f"{name} {subcommand_name}", subcommand, context)


def _format_row(names: str, text: str) -> str:
    match = re.fullmatch(r"(?P<text>.*?)(?:\s*\[(?P<extra>[^\[\]]*)\])?", text, re.DOTALL)
    assert match is not None
    extras = (match["extra"] or "").split("; ")
    defaults = [extra for extra in extras if "x>=" not in extra and "<=x" not in extra]
    limits = [_format_limit(extra) for extra in extras if extra not in defaults]
    default = "; ".join(defaults).removeprefix("default: ")
    meaning = " ".join([*match["text"].split(), *limits])
    cells = (f"`{names}`", f"`{default}`" if default else "", meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _format_limit(limit: str) -> str:
    """Return a range of click, such as `x>=1` or `1<=x<=100`, as a sentence."""
    if limit.startswith("x>="):
        return f"At least {limit.removeprefix('x>=')}."
    return "From {} to {}.".format(*limit.split("<=x<="))
