"""Compares the step-time formulas of `distill plan` with whole jobs on a CPU.

    python -m benchmarks.models.step_time [--only TEXT] [--out FILE] [--write-page]

Each job is a real trainer by its own command, with one thread; a teacher and an engine are
processes of their own, with one thread each. The CPU is calibrated between jobs, and the means of
the rates before and after a job replace the figures of a GPU in `clients/plan/step_time.py`. The
measured time is the median of `time/step`, without the first steps. `cpu` is the processor time of
the trainer for the same steps: on an idle machine it equals the time of a job whose parts follow
each other in the trainer. All answers have the maximum length.

Takes 8 minutes on two idle cores, and resumes: a job of the results is not measured again. Adds
each job to benchmarks/results/step_time.json; writes docs/step-time.md, its picture, and the
predictions of the recipes (`--write-page`: only these).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.models import step_time_page
from benchmarks.models.calibration import calibrate, mean_figures
from benchmarks.models.memory_plan import MemoryCase, make_model
from benchmarks.rollouts.ahead import run_service
from benchmarks.shared.programs import one_thread_environment, run_program
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from clients.config.capture import CaptureJob
from clients.config.kinds import AnyTraining, parse_job
from clients.data.models.shape import ModelShape
from clients.plan.machines import MachineFigures
from clients.plan.memory import Load
from clients.plan.memory_plan import load_of
from clients.plan.step_time import StepTime, step_time
from clients.runs.directory import RunDirectory

SMALL = ModelShape(4, 256, 768, 4, 2, 64, 4096, query_norm=True)
WIDE = ModelShape(4, 512, 1536, 8, 4, 64, 4096, query_norm=True)
DEEP, LARGE_VOCABULARY = replace(SMALL, layers=8), replace(SMALL, vocabulary=16384)
STEPS, SKIPPED = 7, 2
PROMPT, RECORDS = 16, 96


@dataclass(frozen=True)
class StepTimeCase:
    """A job: the sizes of its student, and the length and number of its sequences.

    - method: the key `method.type`.
    - line, sequences: tokens of a sequence, and sequences in a step.
    - keys: further keys of the job by table.
    - teacher: sizes of a teacher of its own process, if the job has one.
    """

    name: str
    method: str
    shape: ModelShape
    line: int
    sequences: int
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    teacher: ModelShape | None = None


_AHEAD = {"rollouts": {"engine": "hf", "lag": 1}}
CASES = [
    StepTimeCase("sft, 4 x 256, 128 tokens", "sft", SMALL, 128, 24),
    StepTimeCase("sft, 4 x 256, 512 tokens", "sft", SMALL, 512, 8),
    StepTimeCase("sft, 4 x 512", "sft", WIDE, 256, 8),
    StepTimeCase("sft, 8 x 256", "sft", DEEP, 256, 12),
    StepTimeCase("sft, 16,384 ids", "sft", LARGE_VOCABULARY, 256, 8),
    StepTimeCase(
        "sft, recomputed layers", "sft", WIDE, 256, 8, {"student": {"gradient_checkpointing": True}}
    ),
    StepTimeCase("offline, 4 x 256", "offline", SMALL, 256, 16),
    StepTimeCase("offline, 4 x 512", "offline", WIDE, 128, 16),
    StepTimeCase("on_policy, answers of 48 tokens", "on_policy", SMALL, 64, 32, teacher=WIDE),
    StepTimeCase("on_policy, 4 x 512", "on_policy", WIDE, 128, 8, teacher=WIDE),
    StepTimeCase("on_policy, lag 1", "on_policy", SMALL, 96, 24, _AHEAD, teacher=SMALL),
    StepTimeCase("rl", "rl", SMALL, 96, 24),
    StepTimeCase(
        "rl, two updates, anchor", "rl", SMALL, 128, 16, {"method": {"updates_per_step": 2}}
    ),
    StepTimeCase("rl, lag 1", "rl", SMALL, 96, 24, _AHEAD),
    StepTimeCase("rl, 4 x 512, lag 1", "rl", WIDE, 128, 16, _AHEAD),
]


class Material:
    """Random models, prompts, texts and stores of the jobs, in one folder; each is made once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def model(self, shape: ModelShape, seed: int = 0) -> Path:
        """Return the directory of a random model with a tokenizer of one token per word."""
        path = self._root / f"model-{shape.layers}-{shape.hidden}-{shape.vocabulary}-{seed}"
        if path.exists():
            return path
        torch.manual_seed(seed)
        words = {f"t{number}": number for number in range(shape.vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        load = Load(shape, 1, False, False, False, 0, 0)
        make_model(MemoryCase("qwen3", load)).save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
        return path

    def records(self, prompt: int, answer: int) -> Path:
        """Return a file of prompts and answers with these numbers of tokens."""
        path = self._root / f"records-{prompt}-{answer}.jsonl"
        ids = np.random.default_rng(0).integers(1, 4096, (RECORDS, prompt + answer))
        texts = [[f"t{number}" for number in row] for row in ids]
        lines = (
            {"prompt": " ".join(words[:prompt]), "answer": " ".join(words[prompt:])}
            for words in texts
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def store(self, shape: ModelShape, line: int) -> Path:
        """Return a store of rows of sequences of `line` tokens."""
        path = self._root / f"store-{shape.vocabulary}-{line}"
        if not path.exists():
            job = CaptureJob.model_validate(
                {
                    "teacher": {
                        "model": str(self.model(replace(SMALL, vocabulary=shape.vocabulary)))
                    },
                    "data": {"path": str(self.records(1, line - 1)), "chat_template": False},
                    "method": {"type": "capture", "store": str(path), "max_tokens": line},
                }
            )
            run = RunDirectory.create(self._root / f"capture-{path.name}", job)
            run_program(
                [sys.executable, "-m", "teacher_service.capture", str(run.path), "--attempt", "1"],
                self._root / "capture.log",
            )
        return path


def job_of(case: StepTimeCase, material: Material, steps: int) -> AnyTraining:
    """Return the job of a case. A teacher is one that the job starts, as `distill plan` needs."""
    sampled = case.method in ("on_policy", "rl")
    tables: dict[str, dict[str, Any]] = {
        "student": {"model": str(material.model(case.shape)), "dtype": "float32"},
        "data": {"path": str(material.records(PROMPT, 1)), "chat_template": False},
        "method": {"type": case.method},
        "train": {"prompts_per_step": case.sequences, "tokens_per_micro_batch": 1024},
        "eval": {"every": 10**6, "prompts": 1},
        "checkpoint": {"every": 10**6},
        "track": {"tensorboard": False},
    }
    if sampled:
        tables["method"] |= {"max_prompt_tokens": PROMPT, "max_new_tokens": case.line - PROMPT}
    if case.method == "sft":
        tables["data"]["path"] = str(material.records(1, case.line - 1))
        tables["method"] |= {"max_tokens": case.line}
    if case.method == "offline":
        tables["data"] = {"path": str(material.store(case.shape, case.line))}
    if case.method == "rl":
        tables["reward"] = {"type": "regex", "pattern": "t1"}
        tables["anchor"] = {"tau": 0.9, "update_period": 2}
        tables["method"] |= {"beta": 0.1, "top_k": 16, "rollouts_per_prompt": 4}
        tables["train"]["prompts_per_step"] //= 4
    if case.teacher is not None:
        tables["teacher"] = {"model": str(material.model(case.teacher, 1))}
    for table, keys in case.keys.items():
        tables[table] = tables.get(table, {}) | dict(keys)
    job = parse_job(json.dumps({**tables, "max_steps": steps}))
    assert not isinstance(job, CaptureJob)
    return job


def predict(case: StepTimeCase, job: AnyTraining, machine: MachineFigures) -> StepTime:
    """Return what `distill plan` predicts for the job on a machine of these figures."""
    load = replace(load_of(job, case.shape, case.line), cuda=False)
    return step_time(job, case.shape, load, machine)


def measure(case: StepTimeCase, job: AnyTraining, root: Path) -> dict[str, float]:
    """Run a job; return the median seconds of a step, of its stages, and of the trainer's CPU."""
    with ExitStack() as services:
        if case.teacher is not None:
            model = str(job.started_teacher.model)
            command = ["teacher_service", "--engine", "hf", "--model", model, "--no-cache"]
            address = services.enter_context(run_service(command, root / "teacher.log", threads=1))
            job = job.model_copy(
                update={
                    "teacher": job.teacher.model_copy(update={"address": address, "model": None})
                }
            )
        run = RunDirectory.create(root / "run", job)
        with (root / "trainer.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "student_trainer", str(run.path), "--attempt", "1"],
                stdout=log, stderr=log, env=one_thread_environment(),
            )  # fmt: skip
            cpu_seconds = list(watch_steps(process, run.metrics))
        assert process.returncode == 0, (root / "trainer.log").read_text()[-3000:]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines = [line for line in lines if line["step"] > SKIPPED]
    stages = {name: f"time/{name}" for name in ("step", "rollout", "teacher_wait", "optim")}
    medians = {
        name: statistics.median(line[metric] for line in lines)
        for name, metric in stages.items()
        if metric in lines[0]
    }
    steps = [after - before for before, after in itertools.pairwise(cpu_seconds)]
    return medians | {"cpu": statistics.median(steps[SKIPPED:])}


def watch_steps(process: subprocess.Popen[bytes], metrics: Path) -> Iterator[float]:
    """Yield the processor seconds of a trainer whenever it has logged a step."""
    lines = 0
    while process.poll() is None:
        time.sleep(0.02)
        written = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if written > lines:
            lines = written
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            yield (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only jobs with this text in their name")
    parser.add_argument("--out", type=Path, default=RESULTS / "step_time.json")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a job")
    parser.add_argument("--write-page", action="store_true", help="only write page and picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = {"machine": describe_machine(), "cases": [case_settings(case) for case in CASES]}
    result = load_results(options.out, settings)
    finished = {run["case"] for run in result["runs"]}
    with tempfile.TemporaryDirectory() as folder:
        material, before = Material(Path(folder)), None
        for case in CASES:
            if options.write_page or options.only not in case.name or case.name in finished:
                continue
            root = Path(tempfile.mkdtemp(dir=folder))
            job = job_of(case, material, options.steps)
            before, load_average = before or calibrate(), os.getloadavg()[0]
            measured = measure(case, job, root)
            after = calibrate()
            machine, before = mean_figures(before, after), after
            time = predict(case, job, machine)
            run = {
                "case": case.name,
                "predicted": time.seconds,
                "parts": dict(time.parts),
                "measured": measured,
                "figures": asdict(machine),
                "load_average": load_average,
            }
            add_run(options.out, result, run)
            print(
                f"{case.name:36s} {time.seconds:6.2f} s predicted, {measured['step']:6.2f} s"
                f" measured, {measured['cpu']:6.2f} s of processor time", flush=True,
            )  # fmt: skip
    if options.out == RESULTS / "step_time.json":
        step_time_page.write(result)


def case_settings(case: StepTimeCase) -> dict[str, Any]:
    """Return what a stored measurement depends on."""
    return json.loads(json.dumps(asdict(case)))


if __name__ == "__main__":
    main()
