"""Starts the rollout services of a job on this machine, and restarts them. Needs no torch."""

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

from clients.config.kinds import AnyTraining
from clients.config.tables.rollouts import RolloutsConfig
from clients.preflight.rollouts import check_gpus, gpus_here
from clients.runs.launch import rollouts_command
from clients.runs.started_services import PLACED_VARIABLE
from protos.errors import DistillError, InvalidInput, Unavailable
from protos.operating_system import count_cores
from protos.rpc.ports import free_ports
from student_trainer.parallel.launcher import is_main_process
from student_trainer.rollout_client.placed_services import PlacedServices

log = logging.getLogger(__name__)

_READY = "rollout service listening on "
_STOP_SECONDS = 10.0
_LOG_INTERVAL_SECONDS = 60.0  # between two messages while an engine starts
# A service that ends _MAX_ENDS times within _WITHIN_SECONDS is not restarted again.
_MAX_ENDS, _WITHIN_SECONDS = 4, 900.0


class RolloutServices:
    """The rollout services of a job.

    token: the token for calls to services that this job started; "" for other services.
    """

    def __init__(self, addresses: list[str], token: str) -> None:
        self._addresses = addresses
        self.token = token
        self._services: list[_Service] = []
        self._ended_count = 0  # services that are not started again
        self._lost: DistillError | None = None
        self._on_lost: Callable[[DistillError], None] = lambda _: None

    def start(self, commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> None:
        """Start one service for each (command, environment). `stop` ends them."""
        self._services = [_Service(*command, self._note_lost_service) for command in commands]

    def stop(self) -> None:
        """End the services that this process started, all at the same time."""
        for service in self._services:
            service.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for service in self._services:
            service.join(deadline)

    @property
    def on_one_machine(self) -> bool:
        """True if this process started the services, so that they run on this machine."""
        return bool(self._services)

    def call_when_lost(self, call: Callable[[DistillError], None]) -> None:
        """Call `call` with the last error when no service will be restarted any more.

        `call` may run in any thread. If the services are already lost, it is called at once.
        """
        self._on_lost = call
        if self._lost is not None:
            call(self._lost)

    def _note_lost_service(self, error: DistillError) -> None:
        """Record that a service will not be restarted. Other services then sample its sequences."""
        self._ended_count += 1
        if self._ended_count < len(self._addresses):
            log.error("%s; the job goes on with the others", error)
            return
        self._lost = error
        self._on_lost(error)

    def addresses(self) -> list[str]:
        """Wait until the services of this process are ready, and return HOST:PORT of every service.

        If the job starts its services, the result is empty on ranks other than 0. Raises
        InvalidInput if a service does not start.
        """
        for service in self._services:
            service.wait_until_ready()
        return self._addresses


@contextmanager
def rollout_services(config: AnyTraining) -> Iterator[RolloutServices | PlacedServices | None]:
    """Start the services of a job in the main process.

    The services end when the context or the process ends. No service is started if the job's runner
    has placed services on a cluster. Yields None if the trainer's own process samples.
    """
    rollouts = config.rollout_engine
    if rollouts is None:
        yield None
        return
    if placed_file := os.environ.get(PLACED_VARIABLE):
        yield PlacedServices(Path(placed_file))
        return
    count = count_engines(config, rollouts)
    engine_threads = share_threads(config, rollouts) if count else 0
    address = rollouts.address
    if address is not None or not is_main_process():
        addresses = [address] if isinstance(address, str) else [*(address or [])]
        yield RolloutServices(addresses, "")
        return
    token = secrets.token_urlsafe(32)
    ports = free_ports(count)  # a restarted service uses its old port
    threads = str(max(1, engine_threads // count))
    services = RolloutServices([f"127.0.0.1:{port}" for port in ports], token)
    try:
        services.start(
            [
                (
                    [
                        *_priority_command(rollouts),
                        *rollouts_command(config.student, rollouts),
                        *_sleep_option(rollouts),
                        *("--port", str(port), "--threads", threads),
                        *("--end-with-parent", str(os.getpid())),
                    ],
                    {"DISTILL_TOKENS": f"admin {token}", **_gpu_variable(config, rollouts, number)},
                )
                for number, port in enumerate(ports)
            ]
        )
        yield services
    finally:
        services.stop()


def count_engines(config: AnyTraining, rollouts: RolloutsConfig) -> int:
    """Return the number of engines that the trainer starts.

    It is usually `rollouts.replicas`. If the engines have no GPUs of their own and the machine has
    GPUs, the engines share the trainer's GPUs. Then there is one engine for each process of the
    trainer, but at most one for each GPU of the machine.
    """
    shared = len(gpus_here()) if rollouts.replicas and not rollouts.gpus else 0
    return min(config.train.processes, shared) or rollouts.replicas


def share_threads(config: AnyTraining, rollouts: RolloutsConfig) -> int:
    """Divide the CPU threads between the trainer's processes and the engines.

    Returns the total number of threads of the engines. Sets $OMP_NUM_THREADS for the trainer; torch
    reads it once, when it is imported. Without a lag, engines and trainer run in turn, so both use
    all threads.
    """
    own_threads = int(os.environ.get("OMP_NUM_THREADS") or count_cores())
    total_threads = own_threads * config.train.processes
    if not rollouts.lag:
        return total_threads
    trainer_threads = max(1, own_threads // 2)
    os.environ["OMP_NUM_THREADS"] = str(trainer_threads)
    return max(1, total_threads - trainer_threads * config.train.processes)


def _priority_command(rollouts: RolloutsConfig) -> list[str]:
    """Return a command prefix that lowers the CPU priority of an engine; [] if it is not needed.

    It is used if the machine has no GPUs and `rollouts.lag` is above 0. The trainer's threads wait
    for each other, so the engine should only use idle CPU time. In measurements, a step then takes
    a quarter less time.
    """
    return ["nice", "-n", "5"] if rollouts.lag and not gpus_here() else []


def _sleep_option(rollouts: RolloutsConfig) -> list[str]:
    """Return the option --sleep for a vllm engine that uses the trainer's GPUs in turn with it."""
    in_turn = rollouts.engine == "vllm" and not rollouts.gpus and not rollouts.lag
    return ["--sleep"] if in_turn and gpus_here() else []


class _Service:
    """A rollout service in a separate process, which is started again when it exits."""

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
        # One thread starts all processes and outlives them: the processes ask the kernel to kill
        # them when the thread that started them ends.
        self._thread = threading.Thread(
            target=self._keep_running, name="rollout-service", daemon=True
        )
        self._thread.start()

    def terminate(self) -> None:
        """Send SIGTERM to the process. It is not started again."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()

    def join(self, deadline: float) -> None:
        """Wait for the process to end; kill it at `deadline` (seconds of the monotonic clock)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Wait until the service listens for the first time. Raises InvalidInput if it exits."""
        start_time = time.monotonic()
        while not self._ready.wait(_LOG_INTERVAL_SECONDS):
            log.info("the rollout engine starts, since %.0f s", time.monotonic() - start_time)
        if self._problem:
            raise InvalidInput(
                f"the rollout engine did not start: {self._problem}",
                field="rollouts.engine",
                hint="read the engine's messages in the log above",
            )

    def _keep_running(self) -> None:
        ends: deque[float] = deque(maxlen=_MAX_ENDS)
        while True:
            code, problem = self._run()
            if self._closing.is_set():
                return
            reason = problem or f"the service ended with exit code {code}"
            if not self._ready.is_set():
                self._problem = reason
                self._ready.set()
                return
            ends.append(time.monotonic())
            if len(ends) == _MAX_ENDS and ends[-1] - ends[0] < _WITHIN_SECONDS:
                break
            log.warning(
                "the rollout service ended with code %s; the trainer starts the service again", code
            )
            # The port or the GPU of the ended service may not be free at once.
            self._closing.wait(len(ends))
        self._on_lost(
            Unavailable(
                f"the rollout service has ended {_MAX_ENDS} times in {ends[-1] - ends[0]:.0f} s, "
                f"the last time: {reason}",
                field="rollouts.engine",
                hint="read the service's messages in the log of the attempt",
            )
        )

    def _run(self) -> tuple[int, str]:
        """Start the process, wait for its end, and return its exit code and last error message."""
        with subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A process group of its own: SIGTERM to the trainer's group asks for a checkpoint,
            # which waits for the engine. `stop` or the end of the trainer ends the engine.
            process_group=0,
        ) as process:
            self._process = process
            if self._closing.is_set():
                process.terminate()
            messages = threading.Thread(
                target=self._forward_messages, args=(process.stderr,), daemon=True
            )
            messages.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_READY):
                    self._ready.set()
            messages.join()
        return process.returncode, self._last_error

    def _forward_messages(self, messages: IO[str]) -> None:
        for line in messages:
            if line.startswith("error: "):
                self._last_error = line.removeprefix("error: ").strip()
            sys.stderr.write(line)


def _gpu_variable(config: AnyTraining, rollouts: RolloutsConfig, number: int) -> dict[str, str]:
    """Return the environment variable that selects the GPUs of engine `number`; {} without GPUs.

    An engine with its own GPUs uses the GPUs that follow the trainer's. Otherwise the engine shares
    the GPU of trainer process `number`. Raises InvalidInput if this machine, or the job's share of
    this machine, has too few GPUs.
    """
    if not rollouts.gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus_here()[number]} if gpus_here() else {}
    check_gpus(config)
    first = config.train.processes + number * rollouts.tensor_parallel_size
    engine_gpus = gpus_here()[first : first + rollouts.tensor_parallel_size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(engine_gpus)}
