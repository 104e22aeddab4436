"""Keeps the rollout services of an attempt running on a cluster, and lists where they are.

A service whose process ends is started again. One whose node is lost is placed again, on that node
when it is back or on another one with room; the trainer's processes go on meanwhile. Imports no
Ray: `driver.py` gives a function that places an actor.
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

from clients.runs.placed_services import VARIABLE, Placed, write_placed
from distill_server.runners.ray.places import Place
from protos.auth.access import TOKENS_VARIABLE
from protos.rpc.channel import ROLLOUTS_TOKEN, TEACHER_TOKEN

_READY = "rollout service listening on "
# A service that ends so often within so many seconds has a fault that a restart does not mend.
_MOST_ENDS, _WITHIN_SECONDS = 4, 900.0
_SHOWN_CHARS = 300
_LOOPBACK = "127.0.0.1"


class LostActor(Exception):
    """The actor or its node is gone, and the process with it."""


class Actor(Protocol):
    """An actor of the cluster that waits for room, then runs one process. No method blocks."""

    def place(self) -> Place | None:
        """Return where it is; None while it waits for room. Raises LostActor."""

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
        """Kill the process, whose shim has this directory."""

    def close(self) -> None:
        """Give the place back; a process that still runs is killed."""


@dataclass(frozen=True)
class EngineProcess:
    """What each service runs: Python's `arguments`, in `folder`, on so many CPU threads."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    cpus: int


@dataclass
class _Engine:
    """One service. starts: of its process so far. ends: times at which it ended by itself."""

    number: int
    actor: Actor
    starts: int = 0
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    was_ready: bool = False
    # Of this actor: its place, the directory of its process, and where that begins in the log.
    place: Place | None = None
    directory: Path | None = None
    log_start: int = 0
    listed: Placed = field(default_factory=Placed)


class Engines:
    """The services of one attempt, whose log directory is `directory`.

    `begin(number)` makes an actor for service `number`. Call `look` again and again, then `stop`.
    """

    def __init__(
        self, process: EngineProcess, count: int, directory: Path, begin: Callable[[int], Actor]
    ) -> None:
        self._process = process
        self._directory = directory
        self._begin = begin
        self._token = secrets.token_urlsafe(32)
        self._file = directory / "rollout-services.json"
        self._one_machine = False
        self._engines = [_Engine(number, begin(number)) for number in range(count)]
        self._written: list[Placed] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which the trainer's processes find the services."""
        return {VARIABLE: str(self._file), ROLLOUTS_TOKEN: self._token}

    def start(self, trainer_nodes: Collection[str]) -> bool:
        """Write the list for the first time, and start the services.

        `trainer_nodes`: of the trainer's processes. Returns False as long as a service is not
        placed: its node, and with it the way of the weights, is not known.
        """
        for engine in self._engines:
            engine.place = engine.place or self._placed(engine)
        places = [engine.place for engine in self._engines]
        if not all(places):
            return False
        self._one_machine = len({*trainer_nodes, *(one.node for one in places if one)}) == 1
        self.look()
        return True

    def look(self) -> None:
        """Follow the services: start those that are placed, and replace those that have ended."""
        for engine in self._engines:
            if not engine.listed.problem:
                self._look_at(engine)
        listed = [engine.listed for engine in self._engines]
        if listed != self._written:
            with suppress(OSError):  # a full disk: the next call tries again
                write_placed(self._file, listed, one_machine=self._one_machine)
                self._written = listed

    def stop(self) -> None:
        """Kill the services."""
        for engine in self._engines:
            if engine.directory is not None and not engine.listed.problem:
                engine.actor.stop(engine.directory)

    def _look_at(self, engine: _Engine) -> None:
        engine.place = engine.place or self._placed(engine)
        if engine.place is None:
            return
        if engine.directory is None:
            self._start(engine, engine.place)
            return
        try:
            code = engine.actor.code()
        except LostActor as error:
            self._note(engine, f"this service is lost ({error}) and waits for a node with room")
            self._replace(engine)
            return
        if code is not None:
            self._ended(engine, f"it ended with exit code {code}")
        elif not engine.listed.address and _READY in self._said(engine):
            engine.was_ready = True
            host = self._host(engine.place)
            host = f"[{host}]" if ":" in host else host
            engine.listed = Placed(f"{host}:{engine.place.port}")

    def _placed(self, engine: _Engine) -> Place | None:
        try:
            return engine.actor.place()
        except LostActor as error:
            self._ended(engine, f"it cannot be placed: {error}")
            return None

    def _start(self, engine: _Engine, place: Place) -> None:
        engine.directory = self._directory / f"rollouts-{engine.number}-start-{engine.starts}"
        engine.starts += 1
        log = self._log(engine)
        engine.log_start = log.stat().st_size if log.exists() else 0
        host = self._host(place)
        listen = ["--host", host, "--port", str(place.port), "--threads", str(self._process.cpus)]
        if host != _LOOPBACK:
            listen.append("--insecure")  # with a token, but without TLS, as Ray's own connections
        environment = {n: v for n, v in self._process.environment.items() if n != TEACHER_TOKEN}
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

    def _ended(self, engine: _Engine, how: str) -> None:
        """Replace a service that ended by itself, unless it never starts, or ends too often."""
        said = [line for line in self._said(engine).splitlines() if line.startswith("error: ")]
        told = said[-1].removeprefix("error: ") if said else how
        now = time.monotonic()
        engine.ends.append(now)
        often = len(engine.ends) == _MOST_ENDS and now - engine.ends[0] < _WITHIN_SECONDS
        # Once may be bad luck: another program has taken the port that was free.
        never_ready = engine.starts > 1 and not engine.was_ready
        if often or never_ready:
            engine.listed = Placed(problem=told[:_SHOWN_CHARS])
            engine.actor.close()
        else:
            self._note(engine, f"{how}; it is started again")
            self._replace(engine)

    def _replace(self, engine: _Engine) -> None:
        engine.actor.close()
        engine.actor = self._begin(engine.number)
        engine.place = engine.directory = None
        engine.listed = Placed()

    def _host(self, place: Place) -> str:
        return _LOOPBACK if self._one_machine else place.address

    def _log(self, engine: _Engine) -> Path:
        return self._directory / f"rollouts-{engine.number}.log"

    def _said(self, engine: _Engine) -> str:
        """Return what the process has logged since it was started."""
        if engine.directory is None:
            return ""
        try:
            with self._log(engine).open("rb") as log:
                log.seek(engine.log_start)
                return log.read().decode("utf-8", "replace")
        except OSError:  # its node has not made the log yet
            return ""

    def _note(self, engine: _Engine, what: str) -> None:
        with suppress(OSError), self._log(engine).open("a") as log:
            log.write(f"runner: {what}\n")
