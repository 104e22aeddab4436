"""The real server with the scripted trainer, and less patience: RUNS HOST PORT SLOTS [OPTIONS].

OPTIONS are JSON: `gpus`, how many to divide; `threads`, of a job; `retries`; `clock`, "jumps" or
"fast": what becomes of time.time; `ranks`, a program of which torch's launcher runs two, with the
number of the attempt; `ray`, the address of a cluster that runs the jobs, with no launcher;
`slurm`, options of sbatch: Slurm runs the jobs, with no launcher;
`linger`, the seconds that a teacher stays without jobs; `lease`, without server and trainers;
`tokens`, the lines of a token file; `keep_days`, as the option --keep-days; `stop_grace`, as the
option --stop-grace with --on-stop=checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from distill_server.jobs.preflight import accept_all
from distill_server.on_end import EndCommand
from distill_server.runners.interface import CommandFactory, Runner
from distill_server.runners.local.runner import LocalRunner
from distill_server.runners.machine import UNCOUNTED, Machine
from distill_server.scheduler import Policy
from distill_server.server import run_server
from protos.auth.access import read_tokens
from protos.errors import DistillError
from protos.rpc.server import ServerEndpoint

POLICY = {"backoff": 0.1, "cancel_grace": 1.5, "cancel_now_grace": 0.5, "poll_every": 0.05}


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    trainer = Path(__file__).with_name("scripted_trainer.py")
    step = "" if from_step is None else str(from_step)
    return [sys.executable, "-S", str(trainer), str(run), str(attempt), step]


def make_launch_command(program: str, *launcher: str) -> CommandFactory:
    """Return a command factory that runs `program` in place of a trainer."""

    def command(
        run: Path, *, attempt: int, processes: int, from_step: int | None = None
    ) -> list[str]:
        script = run / "ranks.py"
        script.write_text(program)
        return [sys.executable, *launcher, str(script), str(attempt)]

    return command


TORCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def spoil_clock(mode: str) -> None:
    """Make time.time jump or run fast; the monotonic clock stays correct."""
    wall_time, start, calls = time.time, time.time(), itertools.count()
    if mode == "jumps":
        time.time = lambda: wall_time() + (3600, -3600, 0)[next(calls) % 3]
    elif mode == "fast":
        time.time = lambda: start + 60 * (wall_time() - start)


def runner_of(options: dict[str, Any]) -> Runner:
    ranks, ray = options.get("ranks"), options.get("ray")
    if "slurm" in options:
        from distill_server.runners.cluster import Cluster
        from distill_server.runners.slurm.jobs import SlurmJobs
        from distill_server.runners.slurm.runner import SlurmRunner

        rank_command = make_launch_command(ranks) if ranks else command
        return SlurmRunner(
            Cluster(SlurmJobs(), "Slurm", 0.5), options["slurm"], command=rank_command
        )
    if ray is None:
        return LocalRunner(command=make_launch_command(ranks, *TORCH) if ranks else command)
    from distill_server.runners.ray.jobs import RayJobs
    from distill_server.runners.ray.runner import RayCluster, RayRunner

    cluster = RayCluster(RayJobs(ray))
    return RayRunner(cluster, command=make_launch_command(ranks) if ranks else command)


def main() -> int:
    runs, host, port, slots = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    gpus = tuple(str(n) for n in range(options["gpus"])) if "gpus" in options else None
    cpus = UNCOUNTED if {"ray", "slurm"} & options.keys() else 0  # as the program
    machine = Machine(slots=slots, cpus_per_job=options.get("threads", 1), cpus=cpus, gpus=gpus)
    os.environ["DISTILL_TOKENS"] = options.get("tokens", "")
    spoil_clock(options.get("clock", ""))
    logging.basicConfig()
    try:
        asyncio.run(
            run_server(
                runs,
                endpoint=ServerEndpoint(host, port, read_tokens(None)),
                runner=runner_of(options),
                policy=Policy(
                    *(machine, 10_000, options.get("retries", 1)),
                    **{**POLICY, **{k: options[k] for k in ("linger", "lease") if k in options}},
                ),
                preflight=accept_all,
                keep_days=options.get("keep_days"),
                stop_grace=options.get("stop_grace"),
                on_end=EndCommand(options["on_end"]) if "on_end" in options else None,
                on_ready=lambda bound: print(f"server listening on {host}:{bound}", flush=True),
            )
        )
    except DistillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
