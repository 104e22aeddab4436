"""Peak memory of a training run against TRL's, and its parts.

    python -m benchmarks.evidence.memory --data train.jsonl [--steps 3]

The runs of `trl_training.py` with few steps, one after another: TRL and `serial` (our
trainer and a teacher service), as they are and with settings that need less memory. The results of
a step are the same with all settings of one program. A reading, every half second, counts all
processes of the run, and pages that they share once. `learning`: readings before the trainer begins
its only checkpoint, at the end; TRL writes none. CPU seconds: all processes, the whole run; they
compare the work of two settings, also on a machine that does other work. `saved`: bytes of the
tensors that autograd keeps for the backward pass of one update, counted by its hooks. Each run is
added to benchmarks/results/evidence_memory.json when it ends; an interrupted benchmark
resumes there. A run takes two minutes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.evidence.trl_training import QUESTIONS, TOKENS, run_trl, train_here
from benchmarks.shared.model_pairs import LONGEST_PROMPT, Pair, make_pair
from benchmarks.shared.process_memory import anonymous_bytes, track_peak_of_children
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import Rollout
from student_trainer.model.loading import recompute_activations
from student_trainer.model.student import Student

STEPS = 3
PROFILE = "profile"
RECOMPUTED = {"student": {"gradient_checkpointing": True}}
SMALL = {"train": {"tokens_per_micro_batch": 256}}
# Changes of our job; of TRL: whether activations are recomputed.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL": ("TRL", {}),
    "serial": ("serial", {}),
    "serial, 256 tokens a pass": ("serial", SMALL),
    "serial, recomputed": ("serial", RECOMPUTED),
    "TRL, recomputed": ("TRL", {"recompute": True}),
    "serial, 256 tokens a pass, recomputed": ("serial", SMALL | RECOMPUTED),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_memory.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    pair = make_pair("real", options.work, options.data)
    result = load_results(options.out, {"machine": describe_machine(), "steps": options.steps})
    for name in (PROFILE, *options.runs):
        if any(run["run"] == name for run in result["runs"]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            measurements = (
                profile_memory(pair)
                if name == PROFILE
                else measure_run(name, pair, options, Path(folder))
            )
        add_run(options.out, result, {"run": name, **measurements})
        print(name, measurements, flush=True)


def profile_memory(pair: Pair) -> dict[str, int]:
    """Return the parts of a trainer's memory: tokens of an update, number of weights, and bytes."""
    return {
        "tokens": QUESTIONS * (LONGEST_PROMPT + TOKENS),
        "weights": run_in_process("count_weights", str(pair.student)),
        "libraries": run_in_process("measure_libraries"),
        "saved": run_in_process("measure_saved_tensors", str(pair.student)),
    }


def measure_run(name: str, pair: Pair, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run once; return the peak in bytes, that of each stage, and the CPU seconds."""
    program, changes = RUNS[name]
    checkpoints = folder / "run" / "checkpoints"

    def stage() -> str:
        return "checkpoint" if checkpoints.exists() else "learning"

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with track_peak_of_children(stage=stage) as peak:
        if program == "TRL":
            run_trl(options, folder / "trl", 0, **changes)
        else:
            train_here(program, pair, options, folder, 0, changes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "peak_bytes": peak.bytes,
        "stages": peak.stages,
        "processes": peak.processes,
        "cpu_seconds": round(spent, 1),
    }


def run_in_process(*name_and_arguments: str) -> int:
    """Return what a function of this file, named by the first word, returns in a new process."""
    call = f"{name_and_arguments[0]}({', '.join(map(repr, name_and_arguments[1:]))})"
    code = f"from benchmarks.evidence.memory import *; print({call})"
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def count_weights(student: str) -> int:
    """Return the number of weights of the student."""
    return sum(
        parameter.numel()
        for parameter in AutoModelForCausalLM.from_pretrained(student).parameters()
    )


def measure_libraries() -> int:
    """Return the bytes of this process with all imports of a trainer, without pages of files."""
    import student_trainer.assembly  # noqa: F401

    return anonymous_bytes()


def measure_saved_tensors(student: str) -> int:
    """Return the bytes that the student saves for the backward pass of one update."""
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    recompute_activations(model, False)
    sequences = [make_placeholder(model.config.vocab_size) for _ in range(QUESTIONS)]
    batch = make_batch(sequences, torch.device("cpu"))
    return saved_bytes(Student(model, bf16=False), batch)


def make_placeholder(vocabulary: int) -> ScoredSequence:
    """Return a sequence as long as the longest one of the benchmark."""
    ids = torch.randint(0, vocabulary, (LONGEST_PROMPT + TOKENS,))
    head = torch.zeros(TOKENS, 1, dtype=torch.int32)
    rollout = Rollout(ids, LONGEST_PROMPT, head, torch.zeros(TOKENS), False, "")
    return ScoredSequence(rollout, placeholder_rows(head.numpy()))


def saved_bytes(student: Any, batch: Any) -> int:
    """Return the bytes of all storages, but weights, that a forward pass saves for backward."""
    weight_addresses = {
        parameter.untyped_storage().data_ptr() for parameter in student.parameters()
    }
    storages: dict[int, int] = {}
    saved_tensors: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_addresses:
            storages[storage.data_ptr()] = storage.nbytes()
            saved_tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        student(batch, lambda rows, index: -rows.token_logprobs, 1.0)
    return sum(storages.values())


if __name__ == "__main__":
    main()
