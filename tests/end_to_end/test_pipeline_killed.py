"""A pipeline of one file, and of a server with its own teacher: server, teacher and trainers are
killed, and it ends with the bits of the same jobs run one by one without a server.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.file import load_jobs, replaced
from clients.config.kinds import AnyJob
from clients.config.rl import RLJob
from clients.config.tables.after import outputs_in
from clients.config.tables.teacher import TeacherLink
from clients.jobs.client import DistillClient, JobHandle
from clients.jobs.job import TERMINAL, JobState
from clients.runs.directory import RunDirectory
from protos.errors import Unavailable
from tests.distill_server.conftest import eventually
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import MakeServer, RealServer, metrics_of, new_run, weights

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

REPEATS = int(os.environ.get("DISTILL_REPEATS", "3"))
SEED = int(os.environ.get("DISTILL_PIPELINE_SEED", "1"))
STEPS = 8
SECONDS = 600.0
# What is killed, with the first and last job during which it may be: only RL has a teacher.
VICTIMS = {"server": (0, 3), "teacher": (2, 2), "trainer": (1, 3)}


def make_pipeline(material: Material) -> list[AnyJob]:
    """Return the jobs capture -> offline -> RL, with a teacher that the server runs -> eval."""
    from tests.student_trainer.tiny import offline_job, rl_job

    rows = CaptureJob.model_validate(
        {
            "name": "rows",
            "data": {"path": str(material.prompts)},
            "teacher": {"model": str(material.teacher), "top_k": 4},
            "method": {"type": "capture", "max_tokens": 32, "shard_bytes": 20_000},
        }
    )
    options = {"max_steps": STEPS, "train__warmup_steps": 2}
    learn = offline_job(material, Path("@rows/store"), name="learn", **options)
    steer = rl_job(
        *(material,),
        **{"name": "steer", "student__model": "@learn/export", "max_steps": STEPS},
        teacher={"model": str(material.teacher), "batch_invariant": True},
    )
    score = EvalJob.model_validate(
        {
            "name": "score",
            "student": {"model": "@steer/export"},
            "data": {"path": str(material.prompts)},
            "reward": {"type": "regex", "pattern": "1"},
            "method": {"type": "eval", "prompts": 256, "max_new_tokens": 6, "temperature": 2.0},
        }
    )
    return [rows, learn, steer, score]


def run_one_by_one(root: Path, jobs: Sequence[AnyJob], teacher: str) -> list[RunDirectory]:
    """Run the jobs without a server, each with the output paths of earlier jobs."""
    runs: dict[str, RunDirectory] = {}
    for job in jobs:
        for output in outputs_in(job):
            source_run = runs[output.job]
            path = source_run.store if output.kind == "store" else source_run.export
            job = replaced(job, output.key, str(path))
        if isinstance(job, RLJob):
            job = job.model_copy(update={"teacher": TeacherLink(address=teacher)})
        runs[job.name] = finish(new_run(root / job.name, job))
    return list(runs.values())


def result_digests(runs: Sequence[RunDirectory]) -> list[Any]:
    """Return digests of what the jobs made: rows, curves and weights, answers and scores."""
    from tests.student_trainer.tiny import curve
    from tests.teacher_service.capture.material import digests

    capture_run, *trained_runs, scored_run = runs
    files = sorted(scored_run.evaluation.glob("*/judged.parquet"))
    answers = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return [
        digests(capture_run.store),
        *((curve(metrics_of(run)), weights(run)) for run in trained_runs),
        (answers, (scored_run.evaluation / "result.json").read_text()),
    ]


class Killer:
    """Kills a part of a server's pipeline when a job has made a step."""

    def __init__(self, server: RealServer, client: DistillClient) -> None:
        self.server, self.client = server, client

    def wait_for(self, job: JobHandle, step: int) -> None:
        """Wait until the job has made the step; at step 0, until it no longer waits for other jobs.

        An evaluation: wait until the first answers are stored, a third of all.
        """
        run = RunDirectory(self.server.runs / job.id)
        answers = run.evaluation / "student" / "journal.jsonl"

        def has_reached() -> bool:
            if job.kind == "eval" and answers.exists() and answers.stat().st_size:
                return True
            if step and any(line["step"] >= step for line in metrics_of(run)[-1:]):
                return True
            with suppress(Unavailable):
                current_job = self.client.get(job.id)
                assert current_job.state is not JobState.FAILED, current_job.reason
                has_begun = (
                    current_job.state is not JobState.QUEUED or "teacher.model" in current_job.phase
                )
                return current_job.state in TERMINAL or (
                    has_begun and not step and job.kind != "eval"
                )
            return False

        eventually(has_reached, SECONDS, pause=0.002)

    def kill(self, victim: str, job: JobHandle) -> bool:
        """Kill one process; False if there is none of this kind by now."""
        if victim == "server":
            self.server.kill()
            self.server.start()
            return True
        if victim == "teacher":
            homes = self.server.runs.glob(".teachers/*/logs/attempt-*")
            directory = max(homes, default=None, key=lambda path: int(path.name[8:]))
        else:
            attempt = self.client.get(job.id).attempt
            directory = self.server.runs / job.id / "logs" / f"attempt-{attempt}"
        if directory is None or not (directory / "shim.json").exists():
            return False
        pid = json.loads((directory / "shim.json").read_text())["child_pid"]
        if (directory / "exit.json").exists():
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False


@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * REPEATS)
def test_killed_anywhere_it_comes_to_the_same_bits(
    material: Material, teacher: str, make_server: MakeServer, tmp_path: Path
) -> None:
    generator = random.Random(SEED)
    job_documents = [
        json.loads(job.model_dump_json(exclude_unset=True)) for job in make_pipeline(material)
    ]
    file = tmp_path / "pipeline.yaml"  # JSON is a subset of YAML
    file.write_text(json.dumps({"job": job_documents}))
    files = load_jobs(file)
    configs = [loaded.config for loaded in files]
    assert configs == make_pipeline(material)
    expected_digests = result_digests(run_one_by_one(tmp_path / "plain", configs, teacher))

    server = make_server(runs=tmp_path / "killed")
    victims = [list(VICTIMS)[n % 3] for n in range(REPEATS)]
    plan = sorted(
        (generator.randint(*VICTIMS[victim]), generator.randint(0, STEPS - 2), victim)
        for victim in victims
    )
    hits = []
    with DistillClient(server.address) as client:
        jobs = client.submit_all(files)
        killer = Killer(server, client)
        for number, step, victim in plan:
            # A capture counts sequences.
            killer.wait_for(jobs[number], step * 80 if number == 0 else step)
            if killer.kill(victim, jobs[number]):
                hits.append((jobs[number].name, step, victim))
        for job in jobs:
            ended_job = job.wait(SECONDS)
            assert ended_job.state is JobState.SUCCEEDED, ended_job.reason
        assert (
            result_digests([RunDirectory(server.runs / job.id) for job in jobs]) == expected_digests
        )
        attempts = {job.name: job.refresh().attempt for job in jobs}
        score = jobs[-1].refresh()
        assert score.metrics["eval/accuracy"] > 0
        scores = json.loads((jobs[-1].pull(tmp_path / "scores") / "result.json").read_text())
        assert scores["models"][0]["pass@1"]["mean"] == score.metrics["eval/accuracy"]
    print(f"{len(hits)} of {len(plan)} kills hit: {hits}; attempts {attempts}")
    assert len(hits) >= len(plan) // 2
