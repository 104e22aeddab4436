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
from distill_server.runners.local.process import claim, read_json, write_json
from distill_server.runners.local.shim_files import LivingShims, attempts_before
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
    driver = SlurmDriver(order, path)
    try:
        code = driver.run()
    finally:
        path.unlink(missing_ok=True)
    time.sleep(_STORAGE_SECONDS)
    exit_record = {"code": code, "ended_at": time.time(), "terminated": driver.is_terminated}
    write_json(directory / "exit.json", exit_record)
    return code if code >= 0 else 128 - code


class SlurmDriver:
    """Starts and follows the ranks of one attempt.

    - path: the file of the order; the logs are in its directory.
    - is_terminated: True if the driver has received SIGTERM.
    """

    def __init__(self, order: TrainerOrder, path: Path) -> None:
        self._order = order
        self._path = path
        self._directory = path.parent
        self._run = RunDirectory(order.run)
        self.is_terminated = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        """Run all ranks to their end and return the first exit code that is not 0, else 0.

        -N means that signal N killed the rank.
        """
        earlier_shims = LivingShims(attempts_before(self._directory))
        while not earlier_shims.are_gone():
            if self.is_terminated or is_fenced() or self._run.read_control().stop:
                if not is_fenced():
                    self._run.write_status(Status(self._order.attempt, "cancelled"))
                return 0
        self._wait_for_ranks(self._start_srun())
        remaining_shims = LivingShims([self._directory])  # on lost nodes, shims may still run
        while not remaining_shims.are_gone():
            pass
        return self._find_first_failure()

    def _on_sigterm(self, *_: object) -> None:
        self.is_terminated = True

    def _start_srun(self) -> int:
        """Start srun outside of this process tree. Return the pipe that is closed when srun ends.

        srun kills its ranks when it gets SIGTERM, and some process trackers of Slurm send SIGTERM
        to all descendants of the batch script. The ranks get SIGTERM from the slurmd of their node.
        """
        order = self._order
        (port,) = free_ports(1, host="")
        command = ["srun", "--export=ALL", "--mpi=none", "--input=none", "--kill-on-bad-exit=1"]
        command += [f"--ntasks={order.processes}", f"--cpus-per-task={order.cpus}"]
        command.append("--distribution=block")
        command += [sys.executable, "-P", "-m", "distill_server.runners.slurm.rank"]
        command += [str(self._path), str(port)]
        # As under torchrun, every rank sees all GPUs of its node: without these variables srun
        # gives the GPUs of the job to the step, and binds none to a rank.
        environment = {"PATH": order.environment.get("PATH", os.defpath), **os.environ}
        for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
            environment.pop(name, None)
        read_end, write_end = os.pipe()
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[write_end],
            start_new_session=True,
            check=True,
        )
        os.close(write_end)
        return read_end

    def _wait_for_ranks(self, pipe: int) -> None:
        """Wait for the end of srun or of all ranks, whichever is first.

        If Slurm does not answer, srun can run longer than its ranks.
        """
        ranks = [self._directory / f"rank-{rank}" for rank in range(self._order.processes)]
        while not select.select([pipe], [], [], _LOOK_SECONDS)[0]:
            if all((rank / "exit.json").exists() for rank in ranks):
                return

    def _find_first_failure(self) -> int:
        """Return the exit code of the rank that failed first, and write it to the log of rank 0."""
        failures: list[tuple[float, int, int]] = []
        for rank in range(self._order.processes):
            exit_record = read_json(self._directory / f"rank-{rank}" / "exit.json")
            if exit_record is None:  # killed together with its shim, or never started
                failures.append((float("inf"), rank, -signal.SIGKILL))
            elif exit_record["code"]:
                failures.append((exit_record["ended_at"], rank, exit_record["code"]))
        if not failures:
            return 0
        _, failed_rank, code = min(failures)
        if self._order.processes > 1:
            with (self._directory / "rank-0.log").open("a") as log:  # rank 0 has ended
                log.write(f"process {failed_rank} ended first, with code {code}\n")
        return code


if __name__ == "__main__":
    sys.exit(main())
