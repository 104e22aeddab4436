"""The driver of one attempt on a Ray cluster, which Ray's Jobs API runs for the server.

    python -m distill_server.runners.ray.driver ORDER_FILE

The driver requests resources for every process, and for every rollout service of the job, on as
few nodes as possible (placement strategy PACK), runs them there and writes exit.json at the end.
If a trainer process fails, all processes are stopped; a rollout service that fails is started
again. If the driver ends for any reason, all processes and services end too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from clients.runs.directory import RunDirectory, Status
from clients.runs.fence import VARIABLE as FENCE
from clients.runs.fence import is_fenced
from distill_server.runners.local.process import claim, write_json
from distill_server.runners.local.shim_files import LivingShims, attempts_before
from distill_server.runners.order import TrainerOrder, take_order
from distill_server.runners.ray.engines import EngineProcess, Engines, LostActor
from distill_server.runners.ray.jobs import summarize_error
from distill_server.runners.ray.places import ActorPlace, rank_variables, shortage
from distill_server.runners.ray.rank import Rank

_LOOK_SECONDS = 0.5
# After a failure, the time for the other processes to end by themselves and to log their reasons.
_PATIENCE_SECONDS = 5.0
# The server must see the nodes' last writes to shared storage before it sees exit.json.
_STORAGE_SECONDS = 1.0


def main() -> int:
    """Take the order, run the attempt, write exit.json and return the exit code.

    Starts nothing if the server has already given up the attempt.
    """
    path = Path(sys.argv[1])
    order = take_order(path)
    os.environ[FENCE] = order.environment[FENCE]
    if is_fenced() or not claim(path.parent):
        return 0  # the server gave up the attempt before it started
    code = RayDriver(order, path.parent).run()
    time.sleep(_STORAGE_SECONDS)
    write_json(path.parent / "exit.json", {"code": code, "ended_at": time.time()})
    return code if code >= 0 else 128 - code


class RayDriver:
    """Starts, follows and stops the processes of one attempt. `directory` holds its logs."""

    def __init__(self, order: TrainerOrder, directory: Path) -> None:
        ray.init(log_to_driver=False)
        self._order = order
        self._directory = directory
        self._run = RunDirectory(order.run)
        self._is_terminated = False
        self._ranks: list[Any] = []
        self._engines: Engines | None = None
        self._shortage = ""
        self._loss_reasons: dict[int, str] = {}  # Ray's messages about lost processes, by rank
        signal.signal(signal.SIGTERM, self._on_sigterm)  # replaces the handler of ray.init

    def run(self) -> int:
        """Run all processes to their end and return the first exit code that is not 0, else 0.

        -N means that signal N killed the process.
        """
        earlier_shims = LivingShims(attempts_before(self._directory))
        order = self._order
        bundles = [{"CPU": order.cpus, "GPU": order.gpus}] * order.processes
        bundles += [{"CPU": order.cpus, "GPU": order.engine_gpus}] * order.engines
        group = placement_group(bundles, strategy="PACK")
        rank_by_ref: dict[Any, int] | None = None
        if self._wait_until(earlier_shims.are_gone) and self._wait_until(
            lambda: self._is_placed(group, bundles)
        ):
            rank_by_ref = self._start_ranks(group)
        if rank_by_ref is None:
            if not is_fenced():
                self._run.write_status(Status(order.attempt, "cancelled"))
            return 0
        codes = self._follow_ranks(rank_by_ref)
        if self._engines is not None:
            self._engines.stop()
        remaining_shims = LivingShims([self._directory])  # shims can outlive a Ray worker that died
        while not remaining_shims.are_gone():
            pass
        first_failure = next(((rank, code) for rank, code in codes.items() if code), None)
        if first_failure:
            self._log_first_failure(*first_failure)
        return first_failure[1] if first_failure else 0

    def _log_first_failure(self, rank: int, code: int) -> None:
        """Append a line to the log of rank 0, which users read, about the process that ended first.

        The line has the exit code and, if known, Ray's reason.
        """
        reason = self._loss_reasons.get(rank)
        if reason or self._order.processes > 1:
            with self._log_file(0).open(
                "a"
            ) as log:  # rank 0 has ended, so there is no other writer
                suffix = f": {reason}" if reason else ""
                log.write(f"process {rank} ended first, with code {code}{suffix}\n")

    def _on_sigterm(self, *_: object) -> None:
        self._is_terminated = True

    def _wait_until(self, ready: Callable[[], bool]) -> bool:
        """Wait until `ready` returns True; return True then, or False if the attempt must stop."""
        while not ready():
            if self._is_terminated or is_fenced() or self._run.read_control().stop:
                return False
        return True

    def _is_placed(self, group: Any, bundles: Sequence[Mapping[str, float]]) -> bool:
        """Wait briefly, and return True if the cluster has placed all processes.

        Otherwise, the missing resources are written to waiting.json.
        """
        waiting_file = self._directory / "waiting.json"
        if group.wait(_LOOK_SECONDS):
            with suppress(OSError):
                waiting_file.unlink(missing_ok=True)
            return True
        missing_resources = shortage(
            bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        )
        if missing_resources != self._shortage:
            with suppress(OSError):  # the file is informative only
                write_json(waiting_file, {"for": missing_resources})
                self._shortage = missing_resources
        return False

    def _start_ranks(self, group: Any) -> dict[Any, int] | None:
        """Start all trainer processes. Return each rank by the Ray reference to its exit code.

        Processes on the same node get consecutive ranks. Returns None if the attempt must stop
        before its rollout services are placed.
        """
        order = self._order
        actors = [_create_actor(group, n, order.cpus, order.gpus) for n in range(order.processes)]
        places = ray.get([rank.place.remote() for rank in actors])
        nodes = [place.node for place in places]
        by_node = sorted(range(len(places)), key=lambda n: nodes.index(nodes[n]))
        variables = rank_variables([places[n] for n in by_node])
        self._ranks = [actors[n] for n in by_node]
        command = (self._order.arguments, {**self._order.environment, **_cluster_variables()})
        if order.engines:
            engines = self._engines = self._make_engines(group)

            def are_engines_started() -> bool:
                time.sleep(_LOOK_SECONDS)
                return engines.start(set(nodes))

            if not self._wait_until(are_engines_started):
                return None
            variables = [
                {**rank_environment, **engines.variables} for rank_environment in variables
            ]
        return {
            actor.run.remote(
                self._rank_directory(rank),
                self._log_file(rank),
                *command,
                variables[rank],
                self._order.folder,
            ): rank
            for rank, actor in enumerate(self._ranks)
        }

    def _make_engines(self, group: Any) -> Engines:
        order = self._order
        process = EngineProcess(order.engine_arguments, order.environment, order.folder, order.cpus)

        def begin(number: int) -> EngineActor:
            # Ray places a bundle again if its node is lost; the actor waits for the new place.
            bundle = order.processes + number
            return EngineActor(_create_actor(group, bundle, order.cpus, order.engine_gpus))

        return Engines(process, order.engines, self._directory, begin)

    def _follow_ranks(self, rank_by_ref: dict[Any, int]) -> dict[int, int]:
        """Wait for all processes; return their exit codes by rank, in the order of exit."""
        codes: dict[int, int] = {}
        kill_at, is_stopping = float("inf"), False
        while rank_by_ref:
            finished_refs, _ = ray.wait(list(rank_by_ref), timeout=_LOOK_SECONDS)
            for exit_code_ref in finished_refs:
                rank = rank_by_ref.pop(exit_code_ref)
                codes[rank] = self._read_exit_code(rank, exit_code_ref)
            if self._engines is not None:
                self._engines.update()
            if any(codes.values()):
                kill_at = min(kill_at, time.monotonic() + _PATIENCE_SECONDS)
            if self._is_terminated and not is_stopping:
                is_stopping = True
                self._stop_ranks(now=self._run.read_control().stop == "now")
            if time.monotonic() >= kill_at:
                self._stop_ranks(now=True)
        return codes

    def _read_exit_code(self, rank: int, exit_code_ref: Any) -> int:
        try:
            code: int = ray.get(exit_code_ref)
        except ray.exceptions.RayError as error:
            # The actor or its node was lost with the process, or the process never started.
            self._loss_reasons[rank] = summarize_error(getattr(error, "cause", None) or error)
            return -signal.SIGKILL
        return code

    def _stop_ranks(self, *, now: bool) -> None:
        for rank, actor in enumerate(self._ranks):
            actor.stop.remote(self._rank_directory(rank), now=now)

    def _rank_directory(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"

    def _log_file(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.log"


class EngineActor:
    """The Ray actor of one rollout service, with the interface that `Engines` calls (`Actor`)."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._place_ref = actor.place.remote()
        self._exit_code_ref: Any = None

    def place(self) -> ActorPlace | None:
        """Return the actor's place; None while it waits for resources. Raises LostActor."""
        place: ActorPlace | None = _get_if_ready(self._place_ref)
        return place

    def start(self, directory: Path, log: Path, *command: Any) -> None:
        """Start Python, as `Rank.run` does."""
        self._exit_code_ref = self._actor.run.remote(directory, log, *command)

    def code(self) -> int | None:
        """Return the exit code of the process; None while it runs. Raises LostActor."""
        code: int | None = _get_if_ready(self._exit_code_ref)
        return code

    def stop(self, directory: Path) -> None:
        """Kill the process."""
        self._actor.stop.remote(directory, now=True)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)


def _create_actor(group: Any, bundle: int, cpus: int, gpus: int) -> Any:
    """Return a new actor for one process in a bundle of the placement group."""
    # Two threads per actor: `run` blocks one until the process ends, `stop` needs another.
    actor_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)(Rank)
    strategy = PlacementGroupSchedulingStrategy(group, bundle)
    return actor_class.options(scheduling_strategy=strategy).remote()


def _get_if_ready(future: Any) -> Any:
    """Return the result of a call to an actor; None if it is not ready. Raises LostActor."""
    finished_refs, _ = ray.wait([future], timeout=0)
    try:
        return ray.get(future) if finished_refs else None
    except ray.exceptions.RayError as error:
        raise LostActor(summarize_error(getattr(error, "cause", None) or error)) from error


def _cluster_variables() -> dict[str, str]:
    """Return the environment variables that connect a process to this cluster.

    A capture uses them: it starts its engines on the cluster.
    """
    token_variables = {
        name: os.environ[name]
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        if name in os.environ
    }
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **token_variables}


if __name__ == "__main__":
    sys.exit(main())
