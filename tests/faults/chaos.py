"""Injects faults into a whole installation for some minutes, and checks that no job notices.

    python -m tests.faults.chaos --minutes 30 [--seed 0] [--every 10] [--only KIND,KIND]

One server, two teachers, two rollout engines, a Redis, an object storage and twelve jobs of three
methods; some jobs sample with the engines, and some copy their checkpoints to the storage. Every
few seconds one fault of `chaos_faults.py`. A supervisor starts all services again, as systemd
would; nobody helps a job. At the end every job must have SUCCEEDED, with each event once, with the
weights of an undisturbed run and with complete copies, and no second server has started.

It needs root, for a small disk (tmpfs). Faults that need another program are left out without it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.config.kinds import AnyJob
from clients.jobs.client import DistillClient
from clients.jobs.job import TERMINAL, JobState
from clients.runs.directory import RunDirectory
from protos.errors import DistillError
from tests.end_to_end.processes import metrics_of, weights
from tests.faults.chaos_faults import KINDS, Chaos, impossible_kinds
from tests.faults.installation import Installation, run_installation, until
from tests.small_disk import why_not
from tests.student_trainer.tiny import curve

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

STEPS = {"on_policy": 200, "rl": 40, "offline": 200}
# The kinds of the jobs, repeatedly: both jobs with engines run from the start.
ORDER = ("engines", "copies", "engines", "on_policy", "rl", "offline")
# After the last fault, every job must end within this time.
END_SECONDS = 1200.0


def configs_of(installation: Installation, material: Material, store: Path) -> dict[str, AnyJob]:
    """Return the jobs by kind. Their patience is seconds: the server handles longer outages.

    Two engines divide the answers of a step, so they round otherwise than one batch.
    """
    from tests.student_trainer.tiny import job, offline_job, rl_job

    teachers: Any = [teacher.address for teacher in installation.teachers]
    intervals: dict[str, Any] = {"checkpoint__every": 20, "eval__every": 50}
    rl: dict[str, Any] = {"max_steps": STEPS["rl"], "checkpoint__every": 5, "eval__every": 20}
    engines = {
        "rollouts__address": [engine.address for engine in installation.engines],
        "rollouts__patience_seconds": 10,
    }
    storage = installation.storage
    copies = {} if storage is None else {"checkpoint__copy_to": storage.url}
    offline = {"max_steps": STEPS["offline"], **intervals}
    return {
        "on_policy": job(
            *(material, teachers),
            max_steps=STEPS["on_policy"],
            teacher__patience_seconds=5,
            **intervals,
        ),
        "rl": rl_job(material, **rl),
        "engines": rl_job(material, **rl, **engines),
        "offline": offline_job(material, store, **offline),
        "copies": offline_job(material, store, **offline, **copies),
    }


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
    only: Sequence[str] | None = None,
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
        configs = configs_of(installation, material, store)
        impossible = impossible_kinds(installation)
        for kind, need in impossible.items():
            say(f"{kind} is left out: it needs {need}")
        kinds = [kind for kind in only or KINDS if kind not in impossible]
        say("undisturbed runs, one of each kind")
        undisturbed_ids = {
            kind: retry_until_answered(lambda config=config: client.submit(config)).id
            for kind, config in configs.items()
            if kind != "copies"
        }
        undisturbed = {
            kind: _wait_for_success(installation, client, job_id)
            for kind, job_id in undisturbed_ids.items()
        }
        undisturbed["copies"] = undisturbed["offline"]
        say("the faults begin")
        chaos = Chaos(installation, random.Random(seed), away_seconds, kinds, say)
        jobs: dict[str, str] = {}
        deadline = time.monotonic() + 60 * minutes
        submitter = threading.Thread(
            target=_keep_busy, args=[client, configs, jobs, jobs_at_once, deadline]
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
    configs: Mapping[str, AnyJob],
    jobs: dict[str, str],
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
                kind, name = ORDER[number % len(ORDER)], f"job-{number}"
                # Each job has copies of its own.
                config = configs[kind].model_copy(update={"name": name})
                jobs[client.submit(config, idempotency_key=name).id] = kind
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
    config = run_directory.config()
    if installation.storage is not None and config.checkpoint.copy_to is not None:
        wrong_copies = installation.storage.server.wrong_copies(
            f"runs/{config.name}", run_directory
        )
        problems += [f"{job_id}: the copy of {name} differs" for name in wrong_copies]
    return problems


def _parse_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"no such kind: {', '.join(unknown)}")
    return kinds


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--away", type=float, default=90.0, help="seconds without a teacher")
    parser.add_argument("--only", type=_parse_kinds, help=f"of {', '.join(KINDS)}")
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
        only=arguments.only,
    )


if __name__ == "__main__":
    main()
