"""Runs a program in a child process, so that a command does not import the program's packages, and
reads its reply (`print_reply`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from protos.errors import ExitCode, InternalFault, error_of


def run_program(module: Sequence[str], document: str, *, quiet: bool) -> tuple[int, str]:
    """Run a module with its arguments and `document` on stdin. Return its exit code and stdout."""
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
    """Return the JSON text of a reply. Raises the program's error, or InternalFault if it died."""
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
