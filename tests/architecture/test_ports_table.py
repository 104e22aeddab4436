"""docs/security.md: the table of ports has every port option of the programs, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from tests.architecture.command_reference import PROGRAMS

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
DEFAULTS = {None: "off", 0: "any"}


def test_the_table_has_every_port_and_its_default() -> None:
    options = {}
    for name, program in PROGRAMS.items():
        command = typer.main.get_command(program)
        with command.make_context(name, [], resilient_parsing=True) as context:
            for option in command.params:
                names_and_text = option.get_help_record(context)
                if names_and_text and "<=65535" in names_and_text[1]:
                    default = option.default
                    options[name, option.opts[0]] = DEFAULTS.get(default, str(default))
    section = PAGE.read_text().split("## Ports\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| `(--[\w-]+)` \| (\w+) \|", section, re.MULTILINE)
    assert {(name, option): default for name, option, default in rows} == options
    assert len(rows) == len(options) == 8
