"""Starts the rollout services of a job on this machine, and restarts one that ends. No torch."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clients.config.kinds import AnyTraining, SamplingJob
from clients.config.tables.rollouts import RolloutsConfig
from clients.preflight.rollouts import check_gpus, gpus_here
from clients.runs.launch import rollouts_command
from clients.runs.placed_services import VARIABLE as PLACED
from protos.errors import DistillError, InvalidInput, Unavailable
from protos.rpc.ports import free_ports
from student_trainer.parallel.launcher import is_main_process
from student_trainer.rollout_client.placed_services import PlacedServices

log = logging.getLogger(__name__)

_READY = "rollout service listening on "
_STOP_SECONDS = 10.0
_TELL_SECONDS = 60.0  # between two messages while an engine starts
# A service that ends so often within so many seconds has a fault that a restart does not mend.
_MOST_ENDS, _WITHIN_SECONDS = 4, 900.0


class RolloutServices:
    """The rollout services of a job. token: for calls to them, "" if they are not of this job."""

    def __init__(self, addresses: list[str], token: str) -> None:
        self._addresses = addresses
        self.token = token
        self._started: list[_Service] = []
        self._ended = 0  # services that are not started again
        self._lost: DistillError | None = None
        self._on_lost: Callable[[DistillError], None] = lambda _: None

    def start(self, commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> None:
        """Start services by (command, environment); `stop` ends them."""
        self._started = [_Service(*command, self._lose) for command in commands]

    def stop(self) -> None:
        """End the services that were started, all at the same time."""
        for service in self._started:
            service.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for service in self._started:
            service.join(deadline)

    @property
    def on_one_machine(self) -> bool:
        """Whether the services run on this machine, because this process has started them."""
        return bool(self._started)

    def when_lost(self, call: Callable[[DistillError], None]) -> None:
        """Call `call`, in any thread, with the last error when no service is started again."""
        self._on_lost = call
        if self._lost is not None:
            call(self._lost)

    def _lose(self, error: DistillError) -> None:
        """Note that a service is not started again; the others sample what it has left."""
        self._ended += 1
        if self._ended < len(self._addresses):
            log.error("%s; the job goes on with the others", error)
            return
        self._lost = error
        self._on_lost(error)

    def addresses(self) -> list[str]:
        """Return HOST:PORT of every service, as soon as all that were started are ready.

        Empty on ranks other than 0 if the job starts its services. Raises InvalidInput if one does
        not start.
        """
        for service in self._started:
            service.wait_until_ready()
        return self._addresses


def rollouts_of(config: AnyTraining) -> RolloutsConfig | None:
    """Return the table `rollouts` of a job; None if the trainer's own process samples."""
    if not isinstance(config, SamplingJob) or config.rollouts.in_trainer:
        return None
    return config.rollouts


@contextmanager
def rollout_services(config: AnyTraining) -> Iterator[RolloutServices | PlacedServices | None]:
    """Start the services of a job in the main process; they end with the context, or with it.

    Starts none if the runner of the job has placed them on a cluster. Yields None if the trainer's
    own process samples.
    """
    rollouts = rollouts_of(config)
    if rollouts is None:
        yield None
        return
    if placed := os.environ.get(PLACED):
        yield PlacedServices(Path(placed))
        return
    count = engines_of(config, rollouts)
    everything = share_threads(config, rollouts) if count else 0
    given = rollouts.address
    if given is not None or not is_main_process():
        addresses = [given] if isinstance(given, str) else [*(given or [])]
        yield RolloutServices(addresses, "")
        return
    token = secrets.token_urlsafe(32)
    ports = free_ports(count)  # a restarted service has the same one
    threads = str(max(1, everything // count))
    services = RolloutServices([f"127.0.0.1:{port}" for port in ports], token)
    try:
        services.start(
            [
                (
                    [
                        *_priority(rollouts),
                        *rollouts_command(config, rollouts),
                        *_sleep(rollouts),
                        *("--port", str(port), "--threads", threads),
                        *("--end-with-parent", str(os.getpid())),
                    ],
                    {"DISTILL_TOKENS": f"admin {token}", **_gpus(config, rollouts, number)},
                )
                for number, port in enumerate(ports)
            ]
        )
        yield services
    finally:
        services.stop()


def engines_of(config: AnyTraining, rollouts: RolloutsConfig) -> int:
    """Return the number of engines that the trainer starts.

    With GPUs, and none of its own, an engine shares each GPU of the trainer.
    """
    shared = len(gpus_here()) if rollouts.replicas and not rollouts.gpus else 0
    return min(config.train.processes, shared) or rollouts.replicas


def share_threads(config: AnyTraining, rollouts: RolloutsConfig) -> int:
    """Divide the CPU threads of the trainer's processes among them and the engines.

    Sets $OMP_NUM_THREADS, which torch reads once, when it is imported. Without lag the engines and
    the trainer work in turn, so all have all threads. Returns the threads of all engines together.
    """
    own = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    everything = own * config.train.processes
    if not rollouts.lag:
        return everything
    kept = max(1, own // 2)
    os.environ["OMP_NUM_THREADS"] = str(kept)
    return max(1, everything - kept * config.train.processes)


def _priority(rollouts: RolloutsConfig) -> list[str]:
    """Return the beginning of the command line of an engine: its priority, on a CPU with a lag.

    The trainer sets the pace, and its threads wait for each other, so the engine computes when the
    trainer does not: measured, a step is a quarter shorter.
    """
    return ["nice", "-n", "5"] if rollouts.lag and not gpus_here() else []


def _sleep(rollouts: RolloutsConfig) -> list[str]:
    """Return the option of a vllm engine that takes turns with the trainer on the same GPU."""
    in_turn = rollouts.engine == "vllm" and not rollouts.gpus and not rollouts.lag
    return ["--sleep"] if in_turn and gpus_here() else []


class _Service:
    """A rollout service in a process of its own, which is started again when it ends."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        on_lost: Callable[[DistillError], None],
    ) -> None:
        self._command = command
        self._on_lost = on_lost
        self._environment = {**os.environ, **environment}
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._problem = self._last_error = ""
        self._process: subprocess.Popen[str] | None = None
        # One thread starts the processes and outlives them: the kernel ends a process that asked
        # for it when the thread that started it ends.
        self._thread = threading.Thread(target=self._keep, name="rollout-service", daemon=True)
        self._thread.start()

    def terminate(self) -> None:
        """Ask the process to end."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()

    def join(self, deadline: float) -> None:
        """Wait for the process to end; kill it at `deadline`, in seconds of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait until the service listens for the first time. Raises InvalidInput if it ends."""
        began = time.monotonic()
        while not self._ready.wait(_TELL_SECONDS):
            log.info("the rollout engine starts, since %.0f s", time.monotonic() - began)
        if self._problem:
            raise InvalidInput(
                f"the rollout engine did not start: {self._problem}",
                field="rollouts.engine",
                hint="the log above has its messages",
            )

    def _keep(self) -> None:
        ends: deque[float] = deque(maxlen=_MOST_ENDS)
        while True:
            code, problem = self._run()
            if self._closing.is_set():
                return
            told = problem or f"it ended with exit code {code}"
            if not self._ready.is_set():
                self._problem = told
                self._ready.set()
                return
            ends.append(time.monotonic())
            if len(ends) == _MOST_ENDS and ends[-1] - ends[0] < _WITHIN_SECONDS:
                break
            log.warning("the rollout service ended with code %s; it is started again", code)
            # Its port, or its GPU, may not be free at once.
            self._closing.wait(len(ends))
        self._on_lost(
            Unavailable(
                f"the rollout service has ended {_MOST_ENDS} times in {ends[-1] - ends[0]:.0f} s, "
                f"the last time: {told}",
                field="rollouts.engine",
                hint="the log of the attempt has its messages",
            )
        )

    def _run(self) -> tuple[int, str]:
        """Run the process to its end; return its exit code and its last error message."""
        with subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A group of its own. SIGTERM to that of the trainer asks for a checkpoint, which waits
            # for the engine; `stop` ends it afterwards, and so does the end of the trainer.
            process_group=0,
        ) as process:
            self._process = process
            if self._closing.is_set():
                process.terminate()
            messages = threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)
            messages.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_READY):
                    self._ready.set()
            messages.join()
        return process.returncode, self._last_error

    def _forward(self, messages: IO[str]) -> None:
        for line in messages:
            if line.startswith("error: "):
                self._last_error = line.removeprefix("error: ").strip()
            sys.stderr.write(line)


def _gpus(config: AnyTraining, rollouts: RolloutsConfig, number: int) -> dict[str, str]:
    """Return the variable with the GPUs of engine `number`; {} without GPUs.

    They are those after the trainer's own, or the GPU of its process `number`, to share it. Raises
    InvalidInput if this machine, or the job's part of it, has too few.
    """
    if not rollouts.gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus_here()[number]} if gpus_here() else {}
    check_gpus(config)
    first = config.train.processes + number * rollouts.tensor_parallel_size
    engines = gpus_here()[first : first + rollouts.tensor_parallel_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(engines)}
