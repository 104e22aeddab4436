"""One program per run directory, even while a killed one is still ending."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from clients.runs.directory import RunDirectory

HOLD = """
import sys, time
from pathlib import Path
from clients.runs.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_program_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "2"], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        start_time = time.monotonic()
        with RunDirectory(tmp_path).held():
            assert time.monotonic() - start_time > 0.5, "the other one had the lock"
            assert holder.wait() == 0
