"""Runs a program in a child process, and reads its reply.

A command uses this module to do work without importing the packages of the program. The program
writes its reply with `print_reply`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from protos.errors import ExitCode, InternalFault, error_of


def run_program(module: Sequence[str], document: str, *, quiet: bool) -> tuple[int, str]:
    """Run a module with `document` as its stdin. Return its exit code and its stdout.

    `module`: the name of the module, and its arguments. `quiet`: do not show its stderr.
    """
    program = subprocess.Popen(
        [sys.executable, "-P", "-m", *module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    with program:
        try:
            stdout, _ = program.communicate(document)
        except KeyboardInterrupt:  # the terminal sends SIGINT to the program too
            program.wait()
            return int(ExitCode.INTERRUPTED), ""
    return program.returncode, stdout


def parse_reply(reply: tuple[int, str], label: str) -> str:
    """Return the JSON text in `reply`, the exit code and the stdout of a program.

    Raises the DistillError that the program reported, or InternalFault if it wrote no JSON. `label`
    names the program in messages.
    """
    code, stdout = reply
    try:
        document = json.loads(stdout)
    except ValueError:
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise InternalFault(
            f"{label} {ending}", hint="run the same command again to resume"
        ) from None
    if "error" in document:
        error = document["error"]
        raise error_of(error["code"], error["message"], field=error["field"], hint=error["hint"])
    return stdout
