"""Whole jobs on two cores: sampling in the trainer, and in an engine beside it, one or two ahead.

    python -m benchmarks.rollouts.ahead [--vllm .venv-vllm/bin/python] [--quick] [--out FILE]

A random student and a teacher that answers each batch after a fixed latency (the fake engine of
`distill-teacher`). Each job is a real trainer, by its own command:

    serial    the trainer samples, waits for the teacher, and learns, with two threads
    in turn   an engine samples, with one thread; the trainer learns, with one thread (lag = 0)
    lag 1     likewise, but the engine is one step ahead: the teacher's latency follows sampling
    lag 2     likewise, two steps ahead: the teacher's latency too is hidden behind other work
    vllm ...  likewise, an engine of vLLM, run by the Python that --vllm names
    ... at once   likewise, with a teacher that answers immediately

The most that an overlap can reach is a step as long as the slower of sampling and learning, with
one thread each: the job "in turn" of the same engine measures both. All answers have the same
length, so they reach the teacher at the same time, which is the worst case for lag 1. The share of
a step that is spent waiting for the teacher is what a teacher that answers at once saves:
`time/teacher_wait` also counts what a slow engine makes the trainer wait.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory

VOCABULARY, PROMPT, LATENCY_MS = 4096, 48, 200
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "serial": (2, {}),
    "in turn": (1, {"service": True}),
    "lag 1": (2, {"lag": 1}),
    "lag 2": (2, {"lag": 2}),
    "vllm in turn": (1, {"service": True, "engine": "vllm"}),
    "vllm lag 1": (1, {"service": True, "engine": "vllm", "lag": 1}),
    "vllm lag 2": (1, {"service": True, "engine": "vllm", "lag": 2}),
}
# Each job that samples ahead, and the job that measures its stages one after the other.
AHEAD = {
    "lag 1": "in turn",
    "lag 2": "in turn",
    "vllm lag 1": "vllm in turn",
    "vllm lag 2": "vllm in turn",
}
_READY = " listening on "


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="a Python with vLLM; without it, no such jobs")
    parser.add_argument("--quick", action="store_true", help="few short steps, for tests")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts_ahead.json"))
    options = parser.parse_args(arguments)
    steps, answers, tokens = (4, 4, 8) if options.quick else (16, 16, 96)
    skipped = 1 if options.quick else 4
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        weights = save_material(root, layers=2 if options.quick else 6)
        stages_by_job = {}
        with serve_teacher(root) as address, serve_teacher(root, latency_ms=0) as instant_address:
            for name, (threads, rollouts) in JOBS.items():
                if "vllm" in name and options.vllm is None:
                    continue
                python = options.vllm if "vllm" in name else sys.executable
                job_rollouts = (
                    {**rollouts, "python": str(python)} if "service" in rollouts else rollouts
                )
                teachers = {name: address} | (
                    {f"{name} at once": instant_address} if name in AHEAD else {}
                )
                for job, teacher_address in teachers.items():
                    lines = run_job(
                        root / job, teacher_address, threads, job_rollouts, steps, answers, tokens
                    )
                    stages_by_job[job] = median_stages(lines[1 + skipped :])
                    print(job, {key: round(value, 3) for key, value in stages_by_job[job].items()})
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f}",
        "workload": {"weights": weights, "answers": answers, "tokens": tokens, "steps": steps},
        "seconds_a_step": stages_by_job,
        "ahead": {
            name: compare(stages_by_job, name, turn)
            for name, turn in AHEAD.items()
            if name in stages_by_job
        },
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, comparison in result["ahead"].items():
        print(
            f"{name}: {comparison['times_serial']:.2f} times as fast as serial, "
            f"{comparison['share_of_the_most']:.2f} of the most, {comparison['waiting']:.1%} "
            "longer than with a teacher that answers at once"
        )


def compare(
    stages_by_job: dict[str, dict[str, float]], name: str, sequential_job: str
) -> dict[str, float]:
    """Compare the seconds of a step with three references.

    These are the serial job, the slower stage of `sequential_job`, and the same job with a teacher
    that answers immediately.
    """
    step = stages_by_job[name]["step"]
    slower_stage = max(
        stages_by_job[sequential_job]["rollout"], stages_by_job[sequential_job]["learning"]
    )
    return {
        "share_of_the_most": slower_stage / step,
        "times_serial": stages_by_job["serial"]["step"] / step,
        "waiting": 1 - stages_by_job[f"{name} at once"]["step"] / step,
    }


def median_stages(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of a step and of its stages."""
    names = {"step": "time/step", "rollout": "time/rollout", "teacher_wait": "time/teacher_wait"}
    medians = {
        name: statistics.median(line[metric] for line in lines) for name, metric in names.items()
    }
    medians["learning"] = statistics.median(
        line["time/step"] - line["time/rollout"] - line["time/teacher_wait"] for line in lines
    )
    return medians


def save_material(root: Path, *, layers: int, hidden: int = 256) -> int:
    """Write the student and the prompts; return the number of weights."""
    torch.manual_seed(0)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    student = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 128,
            head_dim=64,
        )
    )
    student.save_pretrained(root / "student")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(
        root / "student"
    )
    prompts = np.random.default_rng(0).integers(1, VOCABULARY, (400, PROMPT))
    texts = (" ".join(f"t{number}" for number in row) for row in prompts)
    lines = (json.dumps({"prompt": text}) + "\n" for text in texts)
    (root / "prompts.jsonl").write_text("".join(lines))
    return int(student.num_parameters())


@contextmanager
def serve_teacher(root: Path, latency_ms: int = LATENCY_MS) -> Iterator[str]:
    """Serve a teacher of a fixed latency; yields its address."""
    settings = f"vocab={VOCABULARY},latency_ms={latency_ms}"
    command = ["teacher_service", "--engine", "fake", "--model", settings, "--no-cache"]
    with run_service(command, root / f"teacher-{latency_ms}.log", threads=1) as address:
        yield address


@contextmanager
def run_service(
    command: list[str], log: Path, *, threads: int, python: Sequence[str] = (sys.executable,)
) -> Iterator[str]:
    """Run a service of this project by a Python, with its options; yields its address."""
    with log.open("wb") as messages:
        process = subprocess.Popen(
            [*python, "-m", *command, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert _READY in line, log.read_text()
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate()


def run_job(
    path: Path,
    address: str,
    threads: int,
    rollouts: dict[str, Any],
    steps: int,
    answers: int,
    tokens: int,
) -> list[dict[str, Any]]:
    """Run a job to its end; return its metrics."""
    student = path.parent / "student"
    if "service" in rollouts:
        engine = rollouts.get("engine", "hf")
        command = ["student_trainer.rollout_service", "--engine", engine, "--threads", "1"]
        command += ["--model", str(student)]
        log, python = path.with_suffix(".log"), [rollouts["python"]]
        with run_service(command, log, threads=1, python=python) as service:
            service_rollouts = {"address": service, "engine": engine, "lag": rollouts.get("lag", 0)}
            return run_job(path, address, threads, service_rollouts, steps, answers, tokens)
    job = OnPolicyJob.model_validate(
        {
            "student": {"model": str(student)},
            "teacher": {"address": address},
            "data": {"path": str(path.parent / "prompts.jsonl"), "chat_template": False},
            "max_steps": steps,
            "method": {"max_prompt_tokens": 2 * PROMPT, "max_new_tokens": tokens},
            "train": {"prompts_per_step": answers, "tokens_per_micro_batch": 4 * (PROMPT + tokens)},
            "eval": {"every": 10**6, "prompts": 1},
            "checkpoint": {"every": 10**6},
            "track": {"tensorboard": False},
            "rollouts": rollouts,
        }
    )
    directory = RunDirectory.create(path, job)
    process = subprocess.run(
        [sys.executable, "-m", "student_trainer", str(path), "--attempt", "1"],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


if __name__ == "__main__":
    main()
