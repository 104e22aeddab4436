"""The files of deploy/, and the command lines in them."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from distill_server.command import app as server
from teacher_service.command import app as teacher

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "distill"
PROGRAMS = {"distill-server": server, "distill-teacher": teacher}
_PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = _PYPROJECT["project"]
WHEEL: dict[str, Any] = _PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
VERSION: str = PROJECT["version"]


def parse_options(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments with the program's own parser. Raises typer's error for a wrong argument."""
    command = typer.main.get_command(PROGRAMS[program])
    with command.make_context(program, list(arguments)) as context:
        return dict(context.params)


def is_guarded(options: dict[str, Any]) -> bool:
    """Whether the options give a TLS certificate and key and do not set --insecure."""
    return bool(options["tls_cert"] and options["tls_key"] and not options["insecure"])


def tool(name: str) -> str:
    """Return the path of a program that `make test-deploy` installs; skip the test without it."""
    search_path = f"{ROOT / '.venv-deploy' / 'bin'}:{os.environ['PATH']}"
    program_path = shutil.which(name, path=search_path)
    if program_path is None:
        pytest.skip(f"needs {name}: make test-deploy")
    return program_path
