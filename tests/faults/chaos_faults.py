"""The faults that `chaos.py` injects into an installation."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.installation import FAKETIME, Installation
from tests.faults.proxy import Toxics

FULL_SECONDS = HUNG_SECONDS = FROZEN_SECONDS = STOPPED_SECONDS = 15.0
SILENT_SECONDS = 20.0
CLOCK_SECONDS = 20
# How long a server with --on-stop=checkpoint runs before it gets SIGTERM.
SERVING_SECONDS = 10.0
# The longest wait for an upload, the time after its first reset, and the bytes before each.
UPLOAD_SECONDS, CUT_SECONDS, CUT_BYTES = 20.0, 5.0, (32 << 10, 96 << 10)
# The first server runs, or its supervisor has not restarted it yet.
REFUSAL = re.compile(rb"another server uses|belongs to another job database")
# A hung directory delays the refusal of a second server.
REFUSAL_SECONDS = 1200.0

# The methods of Chaos that are faults, with the weight of each in the draw.
KINDS = {
    "kill_trainer": 4,
    "kill_service": 4,
    "service_stopped": 2,
    "network_silent": 2,
    "teachers_away": 1,
    "disk_full": 1,
    "directories_hung": 1,
    "redis_frozen": 1,
    "trainer_stopped": 1,
    "second_server": 1,
    "engine_moved": 1,
    "clock_moved": 1,
    "server_stopped": 1,
    "upload_cut": 1,
}


def impossible_kinds(installation: Installation) -> dict[str, str]:
    """Return the kinds that cannot be drawn here, and what each needs."""
    needs = {
        "directories_hung": ("bindfs", installation.hung is not None),
        "clock_moved": ("libfaketime (package faketime)", FAKETIME is not None),
        "upload_cut": ("the Python package moto", installation.storage is not None),
    }
    return {kind: need for kind, (need, is_there) in needs.items() if not is_there}


@dataclass
class Chaos:
    """The faults. Each method returns when its fault is over.

    `kinds`: those of KINDS that are drawn.
    """

    installation: Installation
    random: random.Random
    away_seconds: float
    kinds: Sequence[str]
    report: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _active_faults: dict[str, threading.Thread] = field(default_factory=dict)

    def inject(self) -> None:
        """Start a random fault that is not active, in a thread; different faults may overlap."""
        self._active_faults = {
            name: thread for name, thread in self._active_faults.items() if thread.is_alive()
        }
        if kinds := [name for name in self.kinds if name not in self._active_faults]:
            (name,) = self.random.choices(kinds, [KINDS[name] for name in kinds])
            self._active_faults[name] = thread = threading.Thread(target=getattr(self, name))
            thread.start()

    def finish(self) -> None:
        """Wait until all started faults are over."""
        for thread in self._active_faults.values():
            thread.join()

    def kill_trainer(self) -> None:
        if victims := self.installation.trainers():
            victim, signum = self.random.choice(victims), self._signal()
            with suppress(psutil.Error):
                shim = any("shim" in word for word in victim.cmdline())
                victim.send_signal(signum)
                self._tell(f"{signum.name} to {'a shim' if shim else 'a trainer'}")

    def kill_service(self) -> None:
        services = self.installation.server, self.installation.redis
        victim = self.random.choice([*services, *self.installation.replicas])
        signum = self._signal()
        victim.process.send_signal(signum)
        self._tell(f"{signum.name} to {victim.kind}")

    def teachers_away(self) -> None:
        self._tell("both teachers away")
        first_teacher, second_teacher = self.installation.teachers
        thread = threading.Thread(target=first_teacher.away, args=[self.away_seconds])
        thread.start()
        second_teacher.away(self.away_seconds)
        thread.join()

    def disk_full(self) -> None:
        self._tell("database disk full")
        ballast = self.installation.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(FULL_SECONDS)
        ballast.unlink()

    def redis_frozen(self) -> None:
        self._tell("Redis frozen")
        self._freeze(self.installation.redis.process, FROZEN_SECONDS)

    def trainer_stopped(self) -> None:
        """Stop one process of an attempt, which may be its shim, and continue it later."""
        if victims := self.installation.trainers():
            self._tell("trainer stopped")
            victim = self.random.choice(victims)
            with suppress(psutil.Error):
                victim.suspend()
                time.sleep(STOPPED_SECONDS)
                victim.resume()

    def service_stopped(self) -> None:
        """Stop a teacher or a rollout engine, and continue it later."""
        victim = self.random.choice(self.installation.replicas)
        self._tell(f"{victim.kind} stopped")
        self._freeze(victim.process, STOPPED_SECONDS)

    def engine_moved(self) -> None:
        """End a rollout engine, and start it at another port, to which its name then leads."""
        self._tell("engine moved")
        self.random.choice(self.installation.engines).move()

    def network_silent(self) -> None:
        """Hold back what a teacher or a rollout engine sends or is sent, without a reset."""
        victim = self.random.choice(self.installation.replicas)
        self._tell(f"silence before {victim.kind}")
        victim.proxy.toxics = Toxics(silent=True)
        time.sleep(SILENT_SECONDS)
        victim.proxy.toxics = Toxics()

    def clock_moved(self) -> None:
        """Start the server again with a clock before or behind the clock of the trainers."""
        seconds = self.random.choice([-CLOCK_SECONDS, CLOCK_SECONDS])
        self._tell(f"server's clock {seconds:+d} s")
        self.installation.move_clock(seconds)

    def server_stopped(self) -> None:
        """Stop a server with --on-stop=checkpoint by SIGTERM; its trainers end before it.

        Another fault may kill the server, or hold a trainer for longer than --stop-grace.
        """
        self.installation.stop_server("checkpoint")
        time.sleep(SERVING_SECONDS)
        attempts = len(self.installation.trainers())
        code = self.installation.stop_server("leave")
        self._tell("server stopped with checkpoints")
        remaining = len(self.installation.trainers())
        if self.kinds == ["server_stopped"] and (code or remaining):
            self.problems.append(
                f"the server ended with code {code}, {remaining} of {attempts} processes remain"
            )

    def upload_cut(self) -> None:
        """Reset each connection to the object storage after some KiB, which only uploads have."""
        assert self.installation.storage is not None
        proxy = self.installation.storage.proxy
        resets = proxy.resets
        cut_bytes = self.random.randrange(*CUT_BYTES)
        proxy.toxics = Toxics(reset_after_bytes=cut_bytes, slice_bytes=1024)
        proxy.reset_connections()  # connections with more bytes would be reset in any request
        deadline = time.monotonic() + UPLOAD_SECONDS
        while proxy.resets == resets and time.monotonic() < deadline:
            time.sleep(0.05)
        if proxy.resets > resets:
            self._tell("S3 uploads cut")
            time.sleep(CUT_SECONDS)
        proxy.toxics = Toxics()

    def second_server(self) -> None:
        """Start a server with another database; the directories belong to the first database."""
        self._tell("second server")
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "distill_server", "--port", "0"]
            command += ["--runs", str(self.installation.runs)]
            command += ["--database", str(Path(directory) / "other.db")]
            second = subprocess.run(command, capture_output=True, timeout=REFUSAL_SECONDS)
        if second.returncode == 0 or REFUSAL.search(second.stderr) is None:
            self.problems.append(f"a second server was not refused: {second.stderr!r}")

    def directories_hung(self) -> None:
        self._tell("run directories hung")
        assert self.installation.hung is not None
        self._freeze(self.installation.hung, HUNG_SECONDS)

    def _freeze(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def _signal(self) -> signal.Signals:
        return self.random.choice([signal.SIGKILL, signal.SIGTERM])

    def _tell(self, fault: str) -> None:
        self.counts[fault] += 1
        self.report(fault)
