"""Keeps the rollout services of an attempt running on a cluster, and lists their addresses.

If the process of a service ends, the service is started again. If its node is lost, the service is
placed again, on the same node after its return or on another node with enough resources. The
trainer's processes continue. This module does not import Ray: `driver.py` passes a function that
places an actor.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from clients.runs.started_services import PLACED_VARIABLE, PlacedService, write_placed
from distill_server.runners.ray.places import ActorPlace
from protos.auth.access import TOKENS_VARIABLE
from protos.rpc.channel import ROLLOUTS_TOKEN, TEACHER_TOKEN

_READY = "rollout service listening on "
# A service that ends 4 times within 900 seconds has a fault that a restart does not mend.
_MAX_ENDS, _WITHIN_SECONDS = 4, 900.0
_SHOWN_CHARS = 300
_LOOPBACK = "127.0.0.1"


class LostActor(Exception):
    """The actor or its node was lost, together with the process."""


class Actor(Protocol):
    """An actor of the cluster that waits for resources, then runs one process. No method blocks."""

    def place(self) -> ActorPlace | None:
        """Return the actor's place; None while it waits for resources. Raises LostActor."""

    def start(
        self,
        directory: Path,
        log: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        """Start Python with these arguments, as `Rank.run` does."""

    def code(self) -> int | None:
        """Return the exit code of the process; None while it runs. Raises LostActor."""

    def stop(self, directory: Path) -> None:
        """Kill the process; `directory` is the directory of its shim."""

    def close(self) -> None:
        """Release the resources; a process that still runs is killed."""


@dataclass(frozen=True)
class EngineProcess:
    """The process of each service: Python with `arguments`, in `folder`, on `cpus` CPU threads."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    cpus: int


@dataclass
class _Engine:
    """One rollout service.

    - starts: number of starts of its process.
    - ends: the times of the newest ends of its process.
    - entry: the record of the service in the list that the trainer reads.
    """

    number: int
    actor: Actor
    starts: int = 0
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_ENDS))
    was_ready: bool = False
    # The actor's place, the directory of its process, and the log's size when the process started.
    place: ActorPlace | None = None
    directory: Path | None = None
    log_start: int = 0
    entry: PlacedService = field(default_factory=PlacedService)


class Engines:
    """The services of one attempt, whose log directory is `directory`.

    `create_actor(number)` creates an actor for service `number`. Call `update` repeatedly, then
    `stop`.
    """

    def __init__(
        self,
        process: EngineProcess,
        count: int,
        directory: Path,
        create_actor: Callable[[int], Actor],
    ) -> None:
        self._process = process
        self._directory = directory
        self._create_actor = create_actor
        self._token = secrets.token_urlsafe(32)
        self._file = directory / "rollout-services.json"
        self._is_one_machine = False
        self._engines = [_Engine(number, create_actor(number)) for number in range(count)]
        self._written_entries: list[PlacedService] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which the trainer's processes find the services."""
        return {PLACED_VARIABLE: str(self._file), ROLLOUTS_TOKEN: self._token}

    def start(self, trainer_nodes: Collection[str]) -> bool:
        """Try to start the services. Returns True when all have a place and are being started.

        `trainer_nodes` are the nodes of the trainer's processes. No service starts before all
        services have a place, because the nodes determine how the services get weights. The started
        services are written to the list that the trainer reads.
        """
        for engine in self._engines:
            engine.place = engine.place or self._find_place(engine)
        places = [engine.place for engine in self._engines]
        if not all(places):
            return False
        self._is_one_machine = (
            len({*trainer_nodes, *(place.node for place in places if place)}) == 1
        )
        self.update()
        return True

    def update(self) -> None:
        """Start the services that Ray has placed on a node, and restart services that ended."""
        for engine in self._engines:
            if not engine.entry.problem:
                self._update_engine(engine)
        entries = [engine.entry for engine in self._engines]
        if entries != self._written_entries:
            with suppress(OSError):  # a full disk: the next call tries again
                write_placed(self._file, entries, one_machine=self._is_one_machine)
                self._written_entries = entries

    def stop(self) -> None:
        """Kill the services."""
        for engine in self._engines:
            if engine.directory is not None and not engine.entry.problem:
                engine.actor.stop(engine.directory)

    def _update_engine(self, engine: _Engine) -> None:
        engine.place = engine.place or self._find_place(engine)
        if engine.place is None:
            return
        if engine.directory is None:
            self._start_process(engine, engine.place)
            return
        try:
            code = engine.actor.code()
        except LostActor as error:
            self._log_note(engine, f"this service is lost ({error}) and waits for a node with room")
            self._replace(engine)
            return
        if code is not None:
            self._replace_or_give_up(engine, f"the service ended with exit code {code}")
        elif not engine.entry.address and _READY in self._read_log(engine):
            engine.was_ready = True
            host = self._listen_host(engine.place)
            host = f"[{host}]" if ":" in host else host
            engine.entry = PlacedService(f"{host}:{engine.place.port}")

    def _find_place(self, engine: _Engine) -> ActorPlace | None:
        try:
            return engine.actor.place()
        except LostActor as error:
            self._replace_or_give_up(engine, f"the service cannot be placed: {error}")
            return None

    def _start_process(self, engine: _Engine, place: ActorPlace) -> None:
        engine.directory = self._directory / f"rollouts-{engine.number}-start-{engine.starts}"
        engine.starts += 1
        log = self._log_file(engine)
        engine.log_start = log.stat().st_size if log.exists() else 0
        host = self._listen_host(place)
        listen = ["--host", host, "--port", str(place.port), "--threads", str(self._process.cpus)]
        if host != _LOOPBACK:
            listen.append("--insecure")  # a token but no TLS: Ray's own connections have none
        environment = {
            name: setting
            for name, setting in self._process.environment.items()
            if name != TEACHER_TOKEN
        }
        engine.actor.start(
            engine.directory,
            log,
            [*self._process.arguments, *listen],
            environment,
            {
                "CUDA_VISIBLE_DEVICES": ",".join(place.gpus),
                TOKENS_VARIABLE: f"admin {self._token}",
            },
            self._process.folder,
        )

    def _replace_or_give_up(self, engine: _Engine, reason: str) -> None:
        """Handle a service whose process has ended by itself, for the reason `reason`.

        The service is started again. If it was never ready, or has ended too often, it is given up.
        """
        error_lines = [
            line for line in self._read_log(engine).splitlines() if line.startswith("error: ")
        ]
        problem = error_lines[-1].removeprefix("error: ") if error_lines else reason
        now = time.monotonic()
        engine.ends.append(now)
        ends_too_often = len(engine.ends) == _MAX_ENDS and now - engine.ends[0] < _WITHIN_SECONDS
        # One failure may be chance: another program may have taken the free port.
        is_never_ready = engine.starts > 1 and not engine.was_ready
        if ends_too_often or is_never_ready:
            engine.entry = PlacedService(problem=problem[:_SHOWN_CHARS])
            engine.actor.close()
        else:
            self._log_note(engine, f"{reason}; the driver starts the service again")
            self._replace(engine)

    def _replace(self, engine: _Engine) -> None:
        engine.actor.close()
        engine.actor = self._create_actor(engine.number)
        engine.place = engine.directory = None
        engine.entry = PlacedService()

    def _listen_host(self, place: ActorPlace) -> str:
        return _LOOPBACK if self._is_one_machine else place.address

    def _log_file(self, engine: _Engine) -> Path:
        return self._directory / f"rollouts-{engine.number}.log"

    def _read_log(self, engine: _Engine) -> str:
        """Return the part of the service's log since the start of its process."""
        if engine.directory is None:
            return ""
        try:
            with self._log_file(engine).open("rb") as log:
                log.seek(engine.log_start)
                return log.read().decode("utf-8", "replace")
        except OSError:  # the node has not created the log yet
            return ""

    def _log_note(self, engine: _Engine, note: str) -> None:
        with suppress(OSError), self._log_file(engine).open("a") as log:
            log.write(f"runner: {note}\n")
