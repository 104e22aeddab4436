"""The driver of one attempt, which the batch script of its Slurm job runs on the first node.

    python -m distill_server.runners.slurm.driver ORDER_FILE

The driver starts the ranks with srun and writes exit.json at the end. If one rank fails, srun kills
the others. If the job is cancelled, preempted or out of time, Slurm sends SIGTERM to all processes:
the trainers write a checkpoint, and the driver waits for them.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from clients.runs.directory import RunDirectory, Status
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import is_fenced
from distill_server.runners.local.living_shims import LivingShims, attempts_before
from distill_server.runners.local.process import claim, read_json, write_json
from distill_server.runners.order import TrainerOrder, read_order
from protos.rpc.ports import free_ports

_LOOK_SECONDS = 0.5
# The server must see the nodes' last writes to shared storage before it sees exit.json.
_STORAGE_SECONDS = 1.0


def main() -> int:
    """Take the order, run the attempt, write exit.json and return the exit code.

    Starts nothing if the server has already given up the attempt.
    """
    path = Path(sys.argv[1])
    directory = path.parent
    if not path.exists() or not claim(directory):
        return 0  # the server gave up the attempt before it started
    order = read_order(path)
    os.environ[FENCE] = order.environment[FENCE]
    driver = Driver(order, path)
    try:
        code = driver.run()
    finally:
        path.unlink(missing_ok=True)
    time.sleep(_STORAGE_SECONDS)
    ended = {"code": code, "ended_at": time.time(), "terminated": driver.terminated}
    write_json(directory / "exit.json", ended)
    return code if code >= 0 else 128 - code


class Driver:
    """Starts and follows the ranks of one attempt. Beside `path`, the order, are its logs.

    `terminated`: SIGTERM has come.
    """

    def __init__(self, order: TrainerOrder, path: Path) -> None:
        self._order = order
        self._path = path
        self._directory = path.parent
        self._run = RunDirectory(order.run)
        self.terminated = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        """Run all ranks to their end and return the first exit code that is not 0, else 0.

        -N means that signal N killed the rank.
        """
        old = LivingShims(attempts_before(self._directory))
        while not old.are_gone():
            if self.terminated or is_fenced() or self._run.read_control().stop:
                if not is_fenced():
                    self._run.write_status(Status(self._order.attempt, "cancelled"))
                return 0
        self._follow(self._srun())
        left = LivingShims([self._directory])  # a shim of a lost node
        while not left.are_gone():
            pass
        return self._result()

    def _on_sigterm(self, *_: object) -> None:
        self.terminated = True

    def _srun(self) -> int:
        """Start srun as a process that is not below this one; return a pipe that ends with it.

        srun kills its ranks when it gets SIGTERM, and some process trackers of Slurm send that to
        all processes below the batch script. The ranks have their own, from the slurmd of a node.
        """
        order = self._order
        (port,) = free_ports(1, host="")
        command = ["srun", "--export=ALL", "--mpi=none", "--input=none", "--kill-on-bad-exit=1"]
        command += [f"--ntasks={order.processes}", f"--cpus-per-task={order.cpus}"]
        command.append("--distribution=block")
        command += [sys.executable, "-P", "-m", "distill_server.runners.slurm.rank"]
        command += [str(self._path), str(port)]
        # As under torchrun, every rank of a node sees the GPUs of all of them: without these
        # variables srun gives the GPUs of the job to the step, and binds none to a rank.
        environment = {"PATH": order.environment.get("PATH", os.defpath), **os.environ}
        for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
            environment.pop(name, None)
        mine, its = os.pipe()
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[its],
            start_new_session=True,
            check=True,
        )
        os.close(its)
        return mine

    def _follow(self, pipe: int) -> None:
        """Wait for the end of srun, or of all ranks: srun outlives them if Slurm is away."""
        ranks = [self._directory / f"rank-{rank}" for rank in range(self._order.processes)]
        while not select.select([pipe], [], [], _LOOK_SECONDS)[0]:
            if all((rank / "exit.json").exists() for rank in ranks):
                return

    def _result(self) -> int:
        """Return the exit code of the rank that failed first; tell it in the log of rank 0."""
        failed: list[tuple[float, int, int]] = []
        for rank in range(self._order.processes):
            ended = read_json(self._directory / f"rank-{rank}" / "exit.json")
            if ended is None:  # killed together with its shim, or never started
                failed.append((float("inf"), rank, -signal.SIGKILL))
            elif ended["code"]:
                failed.append((ended["ended_at"], rank, ended["code"]))
        if not failed:
            return 0
        _, first, code = min(failed)
        if self._order.processes > 1:
            with (self._directory / "rank-0.log").open("a") as log:  # rank 0 has ended
                log.write(f"process {first} ended first, with code {code}\n")
        return code


if __name__ == "__main__":
    sys.exit(main())
