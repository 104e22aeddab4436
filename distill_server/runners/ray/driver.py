"""The driver of one attempt on a Ray cluster, which Ray's Jobs API runs for the server.

    python -m distill_server.runners.ray.driver ORDER_FILE

The driver requests resources for every process, and for every rollout service of the job, on as
few nodes as possible (placement strategy PACK), runs them there and writes exit.json at the end.
If one process fails, all are stopped; a rollout service that fails is started again. If the driver
ends for any reason, all of them end too.
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
from distill_server.runners.local.living_shims import LivingShims, attempts_before
from distill_server.runners.local.process import claim, write_json
from distill_server.runners.order import TrainerOrder, take_order
from distill_server.runners.ray.engines import EngineProcess, Engines, LostActor
from distill_server.runners.ray.jobs import shown
from distill_server.runners.ray.places import Place, rank_variables, shortage
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
    code = Driver(order, path.parent).run()
    time.sleep(_STORAGE_SECONDS)
    write_json(path.parent / "exit.json", {"code": code, "ended_at": time.time()})
    return code if code >= 0 else 128 - code


class Driver:
    """Starts, follows and stops the processes of one attempt. `directory` holds its logs."""

    def __init__(self, order: TrainerOrder, directory: Path) -> None:
        ray.init(log_to_driver=False)
        self._order = order
        self._directory = directory
        self._run = RunDirectory(order.run)
        self._terminated = False
        self._ranks: list[Any] = []
        self._engines: Engines | None = None
        self._lacking = ""
        self._lost: dict[int, str] = {}  # Ray's messages about lost processes, by rank
        signal.signal(signal.SIGTERM, self._on_sigterm)  # replaces the handler of ray.init

    def run(self) -> int:
        """Run all processes to their end and return the first exit code that is not 0, else 0.

        -N means that signal N killed the process.
        """
        old = LivingShims(attempts_before(self._directory))
        order = self._order
        bundles = [{"CPU": order.cpus, "GPU": order.gpus}] * order.processes
        bundles += [{"CPU": order.cpus, "GPU": order.engine_gpus}] * order.engines
        group = placement_group(bundles, strategy="PACK")
        running: dict[Any, int] | None = None
        if self._comes(old.are_gone) and self._comes(lambda: self._is_placed(group, bundles)):
            running = self._start(group)
        if running is None:
            if not is_fenced():
                self._run.write_status(Status(order.attempt, "cancelled"))
            return 0
        codes = self._follow(running)
        if self._engines is not None:
            self._engines.stop()
        left = LivingShims([self._directory])  # shims can outlive a Ray worker that died
        while not left.are_gone():
            pass
        failed = next(((rank, code) for rank, code in codes.items() if code), None)
        if failed:
            self._tell(*failed)
        return failed[1] if failed else 0

    def _tell(self, rank: int, code: int) -> None:
        """Log which process ended first, and Ray's reason, in the log of rank 0 that users read."""
        why = self._lost.get(rank)
        if why or self._order.processes > 1:
            with self._log(0).open("a") as log:  # rank 0 has ended, so there is no other writer
                said = f": {why}" if why else ""
                log.write(f"process {rank} ended first, with code {code}{said}\n")

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _comes(self, ready: Callable[[], bool]) -> bool:
        """Wait until `ready` returns True; False if the attempt is to stop first."""
        while not ready():
            if self._terminated or is_fenced() or self._run.read_control().stop:
                return False
        return True

    def _is_placed(self, group: Any, bundles: Sequence[Mapping[str, float]]) -> bool:
        """Wait a moment for places; without them, tell the server what is lacking."""
        waiting = self._directory / "waiting.json"
        if group.wait(_LOOK_SECONDS):
            with suppress(OSError):
                waiting.unlink(missing_ok=True)
            return True
        why = shortage(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        if why != self._lacking:
            with suppress(OSError):  # it only tells
                write_json(waiting, {"for": why})
                self._lacking = why
        return False

    def _start(self, group: Any) -> dict[Any, int] | None:
        """Start all processes; return their ranks by the Ray object of their exit code.

        Processes on the same node get consecutive ranks. Returns None if the attempt is to stop
        before its rollout services have their places.
        """
        order = self._order
        placed = [_actor(group, n, order.cpus, order.gpus) for n in range(order.processes)]
        places = ray.get([rank.place.remote() for rank in placed])
        nodes = [place.node for place in places]
        by_node = sorted(range(len(places)), key=lambda n: nodes.index(nodes[n]))
        variables = rank_variables([places[n] for n in by_node])
        self._ranks = [placed[n] for n in by_node]
        how = (self._order.arguments, {**self._order.environment, **_cluster()})
        if order.engines:
            engines = self._engines = self._make_engines(group)

            def started() -> bool:
                time.sleep(_LOOK_SECONDS)
                return engines.start(set(nodes))

            if not self._comes(started):
                return None
            variables = [{**one, **engines.variables} for one in variables]
        return {
            actor.run.remote(
                self._place(rank), self._log(rank), *how, variables[rank], self._order.folder
            ): rank
            for rank, actor in enumerate(self._ranks)
        }

    def _make_engines(self, group: Any) -> Engines:
        order = self._order
        process = EngineProcess(order.engine_arguments, order.environment, order.folder, order.cpus)

        def begin(number: int) -> EngineActor:
            # Ray places a bundle again whose node is lost; the actor waits for that.
            bundle = order.processes + number
            return EngineActor(_actor(group, bundle, order.cpus, order.engine_gpus))

        return Engines(process, order.engines, self._directory, begin)

    def _follow(self, running: dict[Any, int]) -> dict[int, int]:
        """Wait for all processes; return their exit codes by rank, in the order of their ends."""
        codes: dict[int, int] = {}
        kill_at, told = float("inf"), False
        while running:
            done, _ = ray.wait(list(running), timeout=_LOOK_SECONDS)
            for one in done:
                rank = running.pop(one)
                codes[rank] = self._code(rank, one)
            if self._engines is not None:
                self._engines.look()
            if any(codes.values()):
                kill_at = min(kill_at, time.monotonic() + _PATIENCE_SECONDS)
            if self._terminated and not told:
                told = True
                self._stop(now=self._run.read_control().stop == "now")
            if time.monotonic() >= kill_at:
                self._stop(now=True)
        return codes

    def _code(self, rank: int, done: Any) -> int:
        try:
            code: int = ray.get(done)
        except ray.exceptions.RayError as error:
            # The actor or its node is gone, and the process with it; or the process never started.
            self._lost[rank] = shown(getattr(error, "cause", None) or error)
            return -signal.SIGKILL
        return code

    def _stop(self, *, now: bool) -> None:
        for rank, actor in enumerate(self._ranks):
            actor.stop.remote(self._place(rank), now=now)

    def _place(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}"

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.log"


class EngineActor:
    """The Ray actor of one rollout service, as `Engines` calls it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._placed = actor.place.remote()
        self._running: Any = None

    def place(self) -> Place | None:
        """Return where it is; None while it waits for room. Raises LostActor."""
        place: Place | None = _result(self._placed)
        return place

    def start(self, directory: Path, log: Path, *how: Any) -> None:
        """Start Python, as `Rank.run` does."""
        self._running = self._actor.run.remote(directory, log, *how)

    def code(self) -> int | None:
        """Return the exit code of the process; None while it runs. Raises LostActor."""
        code: int | None = _result(self._running)
        return code

    def stop(self, directory: Path) -> None:
        """Kill the process."""
        self._actor.stop.remote(directory, now=True)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)


def _actor(group: Any, bundle: int, cpus: int, gpus: int) -> Any:
    """Return a new actor for one process in a bundle of the placement group."""
    # Two threads per actor: `run` blocks one until the process ends, `stop` needs another.
    made = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)(Rank)
    where = PlacementGroupSchedulingStrategy(group, bundle)
    return made.options(scheduling_strategy=where).remote()


def _result(future: Any) -> Any:
    """Return the result of a call to an actor; None before it is there. Raises LostActor."""
    done, _ = ray.wait([future], timeout=0)
    try:
        return ray.get(future) if done else None
    except ray.exceptions.RayError as error:
        raise LostActor(shown(getattr(error, "cause", None) or error)) from error


def _cluster() -> dict[str, str]:
    """Return the variables that connect a capture to this cluster, where it starts its engines."""
    given = {n: os.environ[n] for n in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH") if n in os.environ}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **given}


if __name__ == "__main__":
    sys.exit(main())
