"""`distill run` whose trainer is tests/distill_server/scripted_trainer.py.

python scripted_run.py DIRECTORY [max_steps]
"""

from __future__ import annotations

import sys
from pathlib import Path

from clients.cli.app import main
from clients.cli.live import foreground_run, foreground_teacher


def command(run: Path, *, attempt: int, processes: int) -> list[str]:
    """Return the command of the scripted trainer."""
    trainer = "tests.distill_server.scripted_trainer"
    return [sys.executable, "-m", trainer, str(run), str(attempt), ""]


foreground_run.trainer_command = command
foreground_teacher.wait_for_teachers = lambda config, output: None
steps = [f"--set=max_steps={sys.argv[2]}"] if len(sys.argv) > 2 else []
sys.exit(main(["run", "--resume", sys.argv[1], *steps]))
