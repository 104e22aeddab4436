"""One rank of an attempt, which srun starts; it is the shim of its process.

python -m distill_server.runners.slurm.rank ORDER_FILE MASTER_PORT
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distill_server.runners.interface import KILL_GRACE_SECONDS
from distill_server.runners.local.process import read_json
from distill_server.runners.local.shim import supervise
from distill_server.runners.order import TrainerOrder, read_order
from distill_server.runners.trainer_environment import allowed_variables

# After a failure, the time for the other ranks to end by themselves and to log their reasons,
# before srun kills them.
_PATIENCE_SECONDS = 5.0


def main() -> int:
    """Run one rank of the order to its end; return its exit code, 128 + N for signal N."""
    path, port = Path(sys.argv[1]), sys.argv[2]
    order = read_order(path)
    slurm = dict(os.environ)
    rank = int(slurm["SLURM_PROCID"])
    directory = path.with_name(f"rank-{rank}")
    directory.mkdir(exist_ok=True)
    variables = rank_variables(slurm, port) if order.processes > 1 else {}
    os.environ.clear()
    os.environ.update({**allowed_variables(slurm), **order.environment, **variables})
    os.chdir(order.folder if os.path.isdir(order.folder) else directory)
    command = [sys.executable, *order.arguments]
    code = supervise(directory, path.with_name(f"rank-{rank}.log"), _grace_period(order), command)
    if code and order.processes > 1:
        time.sleep(_PATIENCE_SECONDS)
    return 1 if code is None else code if code >= 0 else 128 - code


def rank_variables(slurm: Mapping[str, str], port: str) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, MASTER_ADDR and so on for a rank.

    `slurm` has the environment variables of the Slurm step. Rank 0 is on the node of the driver,
    where `port` was free.
    """
    tasks_by_node = tasks_per_node(slurm["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_by_node[int(slurm["SLURM_NODEID"])]),
        "MASTER_ADDR": slurm["SLURM_LAUNCH_NODE_IPADDR"],
        "MASTER_PORT": port,
    }


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, text
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _grace_period(order: TrainerOrder) -> Callable[[], float]:
    """Return a function that returns the seconds from SIGTERM to SIGKILL, for the shim."""
    control = Path(order.run) / "control.json"

    def seconds() -> float:
        # After a request to stop, the server has already waited for the checkpoint. Without such a
        # request, Slurm sent SIGTERM, and Slurm sends SIGKILL after its own time limit.
        stop = (read_json(control) or {}).get("stop")
        return KILL_GRACE_SECONDS if stop else float("inf")

    return seconds


if __name__ == "__main__":
    sys.exit(main())
