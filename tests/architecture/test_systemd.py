"""The units of deploy/systemd are valid and start the programs with existing options."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from distill_server.command import app as server
from teacher_service.command import app as teacher

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/distill-service/.venv/bin"
PROGRAMS = {"distill-server": server, "distill-teacher": teacher}


def start_command(name: str) -> list[str]:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((UNITS / f"{name}.service").read_text().replace("\\\n", " "))
    return shlex.split(unit["Service"]["ExecStart"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_is_one_of_ours(name: str) -> None:
    program, *options = start_command(name)
    assert program == f"{INSTALLED}/{name}"
    with typer.main.get_command(PROGRAMS[name]).make_context(name, options) as context:
        assert context.params["port"] in (50051, 50052)


@pytest.mark.parametrize("name", PROGRAMS)
def test_systemd_takes_it(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / f"{name}.service"
    binaries = str(Path(sys.executable).parent)
    unit.write_text((UNITS / unit.name).read_text().replace(INSTALLED, binaries))
    process = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
