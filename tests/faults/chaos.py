"""Injects faults into a whole installation for some minutes, and checks that no job notices.

    python -m tests.faults.chaos --minutes 30 [--seed 0] [--every 10]

One server, two teachers, a Redis and twelve jobs of three methods. Every few seconds one fault: a
process is killed or asked to end, both teachers are away, the database's disk is full, the run
directories do not answer, Redis is frozen. A supervisor starts server, teachers and Redis again,
as systemd would; nobody helps a job. At the end every job must have SUCCEEDED, with each event
once and with the weights of an undisturbed run.

It needs root, for a small disk (tmpfs), and bindfs, for directories that stop answering; without
bindfs this one fault is left out.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from clients.config.kinds import AnyJob
from clients.jobs.client import DistillClient
from clients.jobs.job import TERMINAL, JobState
from clients.runs.directory import RunDirectory
from protos.errors import DistillError
from tests.end_to_end.processes import metrics_of, weights
from tests.faults.installation import Installation, installed, until
from tests.small_disk import why_not
from tests.student_trainer.tiny import curve

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = {"on_policy": 400, "rl": 60, "offline": 400}
FULL_SECONDS = HUNG_SECONDS = FROZEN_SECONDS = 15.0
# After the last fault, every job must end within this time.
END_SECONDS = 1200.0


@dataclass
class Chaos:
    """The faults. Each function returns once the fault is over."""

    place: Installation
    random: random.Random
    away_seconds: float
    told: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    _going: dict[str, threading.Thread] = field(default_factory=dict)

    def inject(self) -> None:
        """Begin one fault that is not going on. Long ones go on in a thread, beside the next."""
        faults = [
            *[self.kill_trainer, self.kill_service] * 3,
            *(self.teachers_away, self.disk_full, self.redis_frozen),
        ]
        if self.place.hung is not None:
            faults.append(self.directories_hung)
        self._going = {name: thread for name, thread in self._going.items() if thread.is_alive()}
        fault = self.random.choice([one for one in faults if one.__name__ not in self._going])
        self._going[fault.__name__] = thread = threading.Thread(target=fault)
        thread.start()

    def finish(self) -> None:
        """Wait for the end of the faults that have begun."""
        for thread in self._going.values():
            thread.join()

    def kill_trainer(self) -> None:
        if victims := self.place.trainers():
            victim, signum = self.random.choice(victims), self._signal()
            with suppress(psutil.Error):
                shim = any("shim" in word for word in victim.cmdline())
                victim.send_signal(signum)
                self._tell(f"{signum.name} to {'a shim' if shim else 'a trainer'}")

    def kill_service(self) -> None:
        victim = self.random.choice([self.place.server, *self.place.teachers, self.place.redis])
        signum = self._signal()
        victim.process.send_signal(signum)
        self._tell(f"{signum.name} to {victim.name.rstrip('12')}")

    def teachers_away(self) -> None:
        self._tell("both teachers away")
        first, second = self.place.teachers
        thread = threading.Thread(target=first.away, args=[self.away_seconds])
        thread.start()
        second.away(self.away_seconds)
        thread.join()

    def disk_full(self) -> None:
        self._tell("database disk full")
        ballast = self.place.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(FULL_SECONDS)
        ballast.unlink()

    def redis_frozen(self) -> None:
        self._tell("Redis frozen")
        self._freeze(self.place.redis.process, FROZEN_SECONDS)

    def directories_hung(self) -> None:
        self._tell("run directories hung")
        assert self.place.hung is not None
        self._freeze(self.place.hung, HUNG_SECONDS)

    def _freeze(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def _signal(self) -> signal.Signals:
        return self.random.choice([signal.SIGKILL, signal.SIGTERM])

    def _tell(self, fault: str) -> None:
        self.counts[fault] += 1
        self.told(fault)


def jobs_of(place: Path, material: Material, store: Path, teachers: list[str]) -> list[AnyJob]:
    """One job of each method. A patience of seconds: a longer outage is for the server."""
    from tests.student_trainer.tiny import job, offline_job, rl_job

    every: dict[str, Any] = {"checkpoint__every": 20, "eval__every": 50}
    return [
        job(
            material,
            teachers,  # type: ignore[arg-type]
            max_steps=STEPS["on_policy"],
            teacher__patience_seconds=5,
            **every,
        ),
        rl_job(material, max_steps=STEPS["rl"], checkpoint__every=5, eval__every=20),
        offline_job(material, store, max_steps=STEPS["offline"], **every),
    ]


def captured(root: Path, material: Material) -> Path:
    """A store of the teacher's rows for 200 prompts."""
    from clients.config.capture import CaptureJob
    from tests.teacher_service.capture.material import capture_here

    lines = material.prompts.read_text().splitlines(keepends=True)
    (root / "data.jsonl").write_text("".join(lines[:200]))
    config = CaptureJob.model_validate(
        {
            "data": {"path": str(root / "data.jsonl")},
            "teacher": {"model": str(material.teacher), "top_k": 4, "max_batch_tokens": 256},
            "method": {"type": "capture", "store": str(root / "store"), "tail_samples": 4},
        }
    )
    verdict, _ = capture_here(root / "capture", config)
    assert verdict == "succeeded"
    return root / "store"


def persistently(call: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Call until the server answers; it may be away."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except DistillError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def run(
    minutes: float,
    *,
    seed: int = 0,
    every: float = 10.0,
    away_seconds: float = 90.0,
    jobs_at_once: int = 12,
) -> None:
    """Raise AssertionError if a job suffers."""
    from tests.student_trainer.tiny import save_material

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    material = save_material(root / "material")
    store = captured(root, material)
    with installed(root, material) as place, DistillClient(place.address, timeout=20) as client:
        kinds = jobs_of(root, material, store, place.teacher_addresses)
        say("undisturbed runs, one of each method")
        first = [persistently(lambda kind=kind: client.submit(kind)).id for kind in kinds]
        undisturbed = [_ended(place, client, job_id) for job_id in first]
        say("the faults begin")
        chaos = Chaos(place, random.Random(seed), away_seconds, say)
        jobs: dict[str, int] = {}
        deadline = time.monotonic() + 60 * minutes
        submitter = threading.Thread(
            target=_keep_busy, args=[client, kinds, jobs, jobs_at_once, deadline]
        )
        submitter.start()
        while time.monotonic() < deadline:
            next_fault = time.monotonic() + every
            chaos.inject()
            time.sleep(max(0.0, next_fault - time.monotonic()))
        chaos.finish()
        submitter.join()
        say(f"the faults are over: {dict(chaos.counts)}")
        wrong = []
        for job_id, kind in jobs.items():
            wrong += _differences(place, client, job_id, undisturbed[kind])
        attempts = [persistently(lambda one=one: client.get(one)).attempt for one in jobs]
        say(f"{len(jobs)} jobs, {sum(attempts)} attempts, {sum(chaos.counts.values())} faults")
        until(lambda: not place.trainers(), 60)
    assert not wrong, "\n".join([*wrong, f"see {root}"])
    shutil.rmtree(root)
    say("every job SUCCEEDED, each event once, all weights as undisturbed; nothing is left over")


def _keep_busy(
    client: DistillClient, kinds: Sequence[AnyJob], jobs: dict[str, int], most: int, deadline: float
) -> None:
    """Submit jobs until `deadline` so that `most` are queued or running; `jobs` gets their kinds.

    A submit that fails is repeated with the same key, so that no job is queued twice.
    """
    while time.monotonic() < deadline:
        with suppress(DistillError):
            states = {job.id: job.state for job in client.list()}
            if sum(states.get(one) not in TERMINAL for one in jobs) < most:
                number = len(jobs)
                job = client.submit(kinds[number % 3], idempotency_key=f"{number}")
                jobs[job.id] = number % 3
                continue
        time.sleep(0.5)


def _ended(place: Installation, client: DistillClient, job_id: str) -> RunDirectory:
    deadline = time.monotonic() + END_SECONDS
    while (job := persistently(lambda: client.get(job_id))).state not in TERMINAL:
        assert time.monotonic() < deadline, f"{job_id} is {job.state} ({job.phase}) for ever"
        time.sleep(0.5)
    assert job.state is JobState.SUCCEEDED, f"{job_id} is {job.state}: {job.reason}"
    return RunDirectory(place.runs / job_id)


def _differences(
    place: Installation, client: DistillClient, job_id: str, model: RunDirectory
) -> list[str]:
    """What is wrong with a job, as sentences."""
    try:
        found = _ended(place, client, job_id)
    except AssertionError as error:
        return [str(error)]
    events = persistently(lambda: list(client.watch(job_id)))
    wrong = []
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        wrong.append(f"{job_id}: events are lost or doubled")
    # An attempt that was killed made steps after its checkpoint, which the next one makes again.
    made = [(event.attempt, event.step) for event in events if event.metrics]
    if made != sorted(set(made)):
        wrong.append(f"{job_id}: steps of an attempt are doubled")
    last = {event.step: event.metrics for event in events if event.metrics}
    told = [{"step": step, **last[step]} for step in sorted(last)]
    if curve(told) != curve(metrics_of(model)):
        wrong.append(f"{job_id}: the events are not the steps of the undisturbed run")
    if curve(metrics_of(found)) != curve(metrics_of(model)):
        wrong.append(f"{job_id}: metrics differ from the undisturbed run's")
    if weights(found) != weights(model):
        wrong.append(f"{job_id}: weights differ from the undisturbed run's")
    return wrong


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--away", type=float, default=90.0, help="seconds without a teacher")
    parser.add_argument("--jobs", type=int, default=12, help="jobs at the same time")
    given = parser.parse_args()
    if reason := why_not():
        print(f"skipped: no file system can be mounted here ({reason}); run it as root")
        return
    run(
        given.minutes,
        seed=given.seed,
        every=given.every,
        away_seconds=given.away,
        jobs_at_once=given.jobs,
    )


if __name__ == "__main__":
    main()
