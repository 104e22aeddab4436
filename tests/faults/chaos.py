"""Injects faults into a whole installation for some minutes, and checks that no job notices.

    python -m tests.faults.chaos --minutes 30 [--seed 0] [--every 10]

One server, two teachers, a Redis and twelve jobs of three methods. Every few seconds one fault: a
process is killed or asked to end, both teachers are away, the database's disk is full, the run
directories do not answer, Redis is frozen, a trainer is stopped for a while, or a second server
with a database of its own is started on the run directories. A supervisor starts server, teachers
and Redis again, as systemd would; nobody helps a job. At the end every job must have SUCCEEDED,
with each event once and with the weights of an undisturbed run, and no second server has started.

It needs root, for a small disk (tmpfs), and bindfs, for directories that stop answering; without
bindfs this one fault is left out.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
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
from typing import TYPE_CHECKING, Any

import psutil

from clients.config.kinds import AnyJob
from clients.jobs.client import DistillClient
from clients.jobs.job import TERMINAL, JobState
from clients.runs.directory import RunDirectory
from protos.errors import DistillError
from tests.end_to_end.processes import metrics_of, weights
from tests.faults.installation import Installation, run_installation, until
from tests.small_disk import why_not
from tests.student_trainer.tiny import curve

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = {"on_policy": 400, "rl": 60, "offline": 400}
FULL_SECONDS = HUNG_SECONDS = FROZEN_SECONDS = STOPPED_SECONDS = 15.0
# The first server runs, or its supervisor has not restarted it yet.
REFUSAL = re.compile(rb"another server uses|belongs to another job database")
# After the last fault, every job must end within this time.
END_SECONDS = 1200.0


@dataclass
class Chaos:
    """The faults. Each method returns when its fault is over."""

    installation: Installation
    random: random.Random
    away_seconds: float
    report: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _active_faults: dict[str, threading.Thread] = field(default_factory=dict)

    def inject(self) -> None:
        """Start a random fault that is not active, in a thread; different faults may overlap."""
        faults = [
            *[self.kill_trainer, self.kill_service] * 3,
            *(self.teachers_away, self.disk_full, self.redis_frozen),
            *(self.trainer_stopped, self.second_server),
        ]
        if self.installation.hung is not None:
            faults.append(self.directories_hung)
        self._active_faults = {
            name: thread for name, thread in self._active_faults.items() if thread.is_alive()
        }
        fault = self.random.choice(
            [candidate for candidate in faults if candidate.__name__ not in self._active_faults]
        )
        self._active_faults[fault.__name__] = thread = threading.Thread(target=fault)
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
        victim = self.random.choice(
            [self.installation.server, *self.installation.teachers, self.installation.redis]
        )
        signum = self._signal()
        victim.process.send_signal(signum)
        self._tell(f"{signum.name} to {victim.name.rstrip('12')}")

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

    def second_server(self) -> None:
        """Start a server with another database; the directories belong to the first database."""
        self._tell("second server")
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "distill_server", "--port", "0"]
            command += ["--runs", str(self.installation.runs)]
            command += ["--database", str(Path(directory) / "other.db")]
            # A hung directory delays the refusal.
            second = subprocess.run(command, capture_output=True, timeout=END_SECONDS)
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


def jobs_of(root: Path, material: Material, store: Path, teachers: list[str]) -> list[AnyJob]:
    """One job of each method. Their patience is seconds: the server handles longer outages."""
    from tests.student_trainer.tiny import job, offline_job, rl_job

    intervals: dict[str, Any] = {"checkpoint__every": 20, "eval__every": 50}
    return [
        job(
            material,
            teachers,  # type: ignore[arg-type]
            max_steps=STEPS["on_policy"],
            teacher__patience_seconds=5,
            **intervals,
        ),
        rl_job(material, max_steps=STEPS["rl"], checkpoint__every=5, eval__every=20),
        offline_job(material, store, max_steps=STEPS["offline"], **intervals),
    ]


def capture_rows(root: Path, material: Material) -> Path:
    """Capture the teacher's rows for 200 prompts into a store; return its path."""
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


def retry_until_answered(call: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Repeat a call until the server answers it or `seconds` have passed."""
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
    fault_interval: float = 10.0,
    away_seconds: float = 90.0,
    jobs_at_once: int = 12,
) -> None:
    """Inject faults into jobs. Raises AssertionError if one differs from undisturbed runs."""
    from tests.student_trainer.tiny import save_material

    start_time = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - start_time:7.1f} s  {line}", flush=True)

    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    material = save_material(root / "material")
    store = capture_rows(root, material)
    with (
        run_installation(root, material) as installation,
        DistillClient(installation.address, timeout=20) as client,
    ):
        kinds = jobs_of(root, material, store, installation.teacher_addresses)
        say("undisturbed runs, one of each method")
        undisturbed_ids = [
            retry_until_answered(lambda kind=kind: client.submit(kind)).id for kind in kinds
        ]
        undisturbed = [
            _wait_for_success(installation, client, job_id) for job_id in undisturbed_ids
        ]
        say("the faults begin")
        chaos = Chaos(installation, random.Random(seed), away_seconds, say)
        jobs: dict[str, int] = {}
        deadline = time.monotonic() + 60 * minutes
        submitter = threading.Thread(
            target=_keep_busy, args=[client, kinds, jobs, jobs_at_once, deadline]
        )
        submitter.start()
        while time.monotonic() < deadline:
            next_fault = time.monotonic() + fault_interval
            chaos.inject()
            time.sleep(max(0.0, next_fault - time.monotonic()))
        chaos.finish()
        submitter.join()
        say(f"the faults are over: {dict(chaos.counts)}")
        problems = chaos.problems
        for job_id, kind in jobs.items():
            problems += _differences(installation, client, job_id, undisturbed[kind])
        attempts = [
            retry_until_answered(lambda job_id=job_id: client.get(job_id)).attempt
            for job_id in jobs
        ]
        say(f"{len(jobs)} jobs, {sum(attempts)} attempts, {sum(chaos.counts.values())} faults")
        until(lambda: not installation.trainers(), 60)
    assert not problems, "\n".join([*problems, f"see {root}"])
    shutil.rmtree(root)
    say("every job SUCCEEDED, each event once, all weights as undisturbed; nothing is left over")


def _keep_busy(
    client: DistillClient,
    kinds: Sequence[AnyJob],
    jobs: dict[str, int],
    max_active: int,
    deadline: float,
) -> None:
    """Keep `max_active` jobs queued or running until `deadline`; `jobs` gets their kinds.

    A submit that fails is repeated with the same key, so that no job is queued twice.
    """
    while time.monotonic() < deadline:
        with suppress(DistillError):
            states = {job.id: job.state for job in client.list()}
            if sum(states.get(job_id) not in TERMINAL for job_id in jobs) < max_active:
                number = len(jobs)
                job = client.submit(kinds[number % 3], idempotency_key=f"{number}")
                jobs[job.id] = number % 3
                continue
        time.sleep(0.5)


def _wait_for_success(
    installation: Installation, client: DistillClient, job_id: str
) -> RunDirectory:
    deadline = time.monotonic() + END_SECONDS
    while (job := retry_until_answered(lambda: client.get(job_id))).state not in TERMINAL:
        assert time.monotonic() < deadline, f"{job_id} is {job.state} ({job.phase}) for ever"
        time.sleep(0.5)
    assert job.state is JobState.SUCCEEDED, f"{job_id} is {job.state}: {job.reason}"
    return RunDirectory(installation.runs / job_id)


def _differences(
    installation: Installation, client: DistillClient, job_id: str, model: RunDirectory
) -> list[str]:
    """Compare a job with the undisturbed run `model`; return one sentence for each difference."""
    try:
        run_directory = _wait_for_success(installation, client, job_id)
    except AssertionError as error:
        return [str(error)]
    events = retry_until_answered(lambda: list(client.watch(job_id)))
    problems = []
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        problems.append(f"{job_id}: events are lost or doubled")
    # The attempt after a killed one repeats the steps after the checkpoint.
    attempt_steps = [(event.attempt, event.step) for event in events if event.metrics]
    if attempt_steps != sorted(set(attempt_steps)):
        problems.append(f"{job_id}: steps of an attempt are doubled")
    last_metrics = {event.step: event.metrics for event in events if event.metrics}
    reported_metrics = [{"step": step, **last_metrics[step]} for step in sorted(last_metrics)]
    if curve(reported_metrics) != curve(metrics_of(model)):
        problems.append(f"{job_id}: the events are not the steps of the undisturbed run")
    if curve(metrics_of(run_directory)) != curve(metrics_of(model)):
        problems.append(f"{job_id}: metrics differ from the undisturbed run's")
    if weights(run_directory) != weights(model):
        problems.append(f"{job_id}: weights differ from the undisturbed run's")
    return problems


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--away", type=float, default=90.0, help="seconds without a teacher")
    parser.add_argument("--jobs", type=int, default=12, help="jobs at the same time")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"skipped: no file system can be mounted here ({reason}); run it as root")
        return
    run(
        arguments.minutes,
        seed=arguments.seed,
        fault_interval=arguments.every,
        away_seconds=arguments.away,
        jobs_at_once=arguments.jobs,
    )


if __name__ == "__main__":
    main()
