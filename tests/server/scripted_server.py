"""The real server with the scripted trainer, and less patience: RUNS HOST PORT SLOTS."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from distill_server.machine import Machine
from distill_server.runner import LocalRunner
from distill_server.scheduler import Policy
from distill_server.server import run_server
from protos.errors import DistillError
from protos.server import Endpoint

POLICY = {"backoff": 0.1, "cancel_grace": 1.5, "cancel_now_grace": 0.5, "look_every": 0.05}


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    trainer = Path(__file__).with_name("scripted_trainer.py")
    step = "" if from_step is None else str(from_step)
    return [sys.executable, "-S", str(trainer), str(run), str(attempt), step]


def main() -> int:
    runs, host, port, slots = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig()
    try:
        asyncio.run(
            run_server(
                runs,
                endpoint=Endpoint(host, port),
                runner=LocalRunner(command=command),
                policy=Policy(Machine(slots=slots), retries=1, **POLICY),
                on_ready=lambda bound: print(f"server listening on {host}:{bound}", flush=True),
            )
        )
    except DistillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
