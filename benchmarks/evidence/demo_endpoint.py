"""A student learns from an external vLLM server, through `distill-teacher --engine endpoint`.

    .venv-vllm/bin/python -m benchmarks.evidence.demo_endpoint --data train.jsonl [--steps 12]

The models and the questions are those of `demo_real.py`: SmolLM2-135M-Instruct, here in
vLLM's own HTTP server, teaches a student of 22 of its 30 layers on-policy (demo_endpoint.toml).
Prints and stores the exact KL(student||teacher) on held-out questions before and after, and the
forward KL that the job itself measures. Needs vLLM; its CPU build is enough.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.evidence.demo_real import examine_student, split_data
from benchmarks.shared.model_pairs import Pair, make_pair
from benchmarks.shared.programs import set_options
from clients.cli.demos.services import Services
from tests.vllm.vllm_server import KEY, vllm_server

JOB = Path(__file__).parent / "demo_endpoint.toml"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/demo-endpoint"), help="made anew")
    parser.add_argument("--models", type=Path, default=Path("runs/draws"), help="kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo_endpoint.json"))
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    disable_progress_bar()
    torch.set_num_threads(1)
    os.environ["DISTILL_ENDPOINT_KEY"] = KEY
    pair = make_pair("real", options.models, options.data)
    shutil.rmtree(options.work, ignore_errors=True)
    logs = options.work / "logs"
    logs.mkdir(parents=True)
    held_out = split_data(options.data, pair, options.work, 1)
    before = examine_student("before", pair.student, pair, held_out, 0.0)
    print(f"before: {before.kl:.3f} nats a token; see {logs}", flush=True)
    began = time.monotonic()
    with vllm_server(pair.teacher.absolute(), logs / "vllm.log") as url, Services(logs) as services:
        run = train_student(services, pair, url, options.work.absolute(), options.steps)
    after = examine_student("after", run / "export", pair, held_out, time.monotonic() - began)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["eval/kl"] for line in metrics if "eval/kl" in line}
    record = {"steps": options.steps, "kl": [before.kl, after.kl], "eval_kl": measured}
    record["seconds"] = after.seconds
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"after {options.steps} steps and {after.seconds:.0f} s: {after.kl:.3f} nats a token")
    print("forward KL of the job by step:", {step: round(kl, 3) for step, kl in measured.items()})
    if after.kl >= before.kl:
        raise SystemExit("the KL has not fallen")


def train_student(services: Services, pair: Pair, url: str, work: Path, steps: int) -> Path:
    """Start the teacher in front of the server, run the job to its end, return its directory."""
    command = ["teacher_service", "--engine", "endpoint", "--model", url, "--port", "0"]
    command += ["--tokenizer", str(pair.teacher.absolute()), "--no-cache"]
    settings = {
        "student.model": str(pair.student.absolute()),
        "teacher.address": services.listen("teacher", command),
        "data.path": str(work / "train.jsonl"),
        "max_steps": str(steps),
    }
    runs = work / "on-policy"
    services.run("job", ["clients", "run", str(JOB), "--runs", str(runs), *set_options(settings)])
    (run,) = runs.iterdir()
    return run


if __name__ == "__main__":
    main()
