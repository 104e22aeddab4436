"""Trains one student with every tail estimator, on-policy, and measures the exact KL held out.

    python -m benchmarks.draws.training --data train.jsonl --pair toy [--seeds 5] [--processes 2]
    python -m benchmarks.draws.training --data train.jsonl --pair real [--seeds 5] [--processes 2]

Each step samples one answer to each of its questions, the teacher scores it, and the student makes
one update. The pairs are in `benchmarks/shared/model_pairs.py`. Each run is added to
benchmarks/results/draw_training.json when it ends; an interrupted benchmark resumes
there. `benchmarks.draws.noise` makes the page of it, docs/draws.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.evaluation import compute_logits, hidden_states, make_sampler, measure_kl
from benchmarks.shared.model_pairs import Pair, PairName, load_questions, make_pair, row_bytes
from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.losses import (
    Rows,
    Tail,
    exact_kl,
    fused_linear_loss,
    rows_from_logits,
    topk_kl,
)


@dataclass(frozen=True)
class TailLoss:
    """A loss: a tail mode with k head ids and M draws; tail None is the exact KL of all logits."""

    tail: Tail | None
    k: int = 0
    draws: int = 0

    @property
    def name(self) -> str:
        if self.tail is None:
            return "exact"
        return f"{self.tail}, k = {self.k}" + (f", M = {self.draws}" if self.draws else "")

    def ids(self, vocabulary: int) -> int:
        """Number of ids of a row."""
        return vocabulary if self.tail is None else self.k + self.draws

    def bytes(self, vocabulary: int) -> int:
        """Bytes of a row on the wire, request and answer. All logits: float16, the answer only."""
        if self.tail is None:
            return 2 * vocabulary
        return round(row_bytes(self.k, self.draws, head_by_student=True))


LOSSES = (
    TailLoss(None),
    TailLoss("bucket+sampled", 64),
    TailLoss("bucket+draws", 8, 16),
    TailLoss("published", 64),
    TailLoss("none", 64),
    TailLoss("bucket", 64),
    TailLoss("bucket+sampled", 512),
    TailLoss("bucket+draws", 8, 8),
    TailLoss("bucket+draws", 32, 16),
    TailLoss("bucket+draws", 16, 48),
)
DECISIVE = 4


@dataclass(frozen=True)
class TrainingSizes:
    """prompts: per step, one answer each. tokens: maximum of an answer. held_out: prompts."""

    prompts: int
    tokens: int
    held_out: int
    steps: int
    learning_rate: float


SIZES: dict[PairName, TrainingSizes] = {
    "real": TrainingSizes(prompts=4, tokens=24, held_out=32, steps=40, learning_rate=1e-4),
    "toy": TrainingSizes(prompts=8, tokens=48, held_out=64, steps=50, learning_rate=5e-3),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--pair", choices=["real", "toy"], required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draw_training.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--one", type=int, nargs=2, metavar=("WAY", "SEED"), help="one run only")
    options = parser.parse_args(arguments)
    pair = make_pair(options.pair, options.work, options.data)
    sizes = SIZES[cast(PairName, options.pair)]
    if options.one:
        loss_number, seed = options.one
        metrics = train_once(LOSSES[loss_number], seed, pair, options.data, sizes)
        print(json.dumps({"way": LOSSES[loss_number].name, "seed": seed, **metrics}))
        return
    command = [sys.executable, "-m", "benchmarks.draws.training", *(arguments or sys.argv[1:])]
    results = RunResults(options.out, options.pair, sizes)
    # The losses that decide first, with all seeds: a run of the real pair takes minutes.
    numbers = range(len(LOSSES))
    parts = numbers[:DECISIVE], numbers[DECISIVE:]
    runs = [
        (loss_number, seed)
        for part in parts
        for seed in range(options.seeds)
        for loss_number in part
    ]
    missing = [
        (loss_number, seed)
        for loss_number, seed in runs
        if not results.has(LOSSES[loss_number].name, seed)
    ]
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda run: results.add(_run_in_process(command, *run)), missing))


class RunResults:
    """The file of results. Each run is added when it ends, so that a restart resumes."""

    def __init__(self, path: Path, pair: str, sizes: TrainingSizes) -> None:
        self._path, self._pair, self._lock = path, pair, Lock()
        stored_pairs = json.loads(path.read_text()) if path.exists() else {}
        self._pair_results = stored_pairs.get(pair, {})
        if {name: self._pair_results.get(name) for name in vars(sizes)} != vars(sizes):
            self._pair_results = {**vars(sizes), "runs": []}

    def has(self, loss_name: str, seed: int) -> bool:
        return any(
            (run["way"], run["seed"]) == (loss_name, seed) for run in self._pair_results["runs"]
        )

    def add(self, run: dict[str, Any] | None) -> None:
        if run is None:
            return
        with self._lock:
            self._pair_results["runs"].append(run)
            self._pair_results["runs"].sort(
                key=lambda added_run: (added_run["seed"], added_run["way"])
            )
            stored_pairs = json.loads(self._path.read_text()) if self._path.exists() else {}
            partial = self._path.with_suffix(".part")
            partial.write_text(
                json.dumps(stored_pairs | {self._pair: self._pair_results}, indent=1) + "\n"
            )
            partial.rename(self._path)
        print(f"{run['way']}, seed {run['seed']}: KL {run['kl']}", flush=True)


def _run_in_process(command: list[str], loss_number: int, seed: int) -> dict[str, Any] | None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [*command, "--one", str(loss_number), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        print(
            f"{LOSSES[loss_number].name}, seed {seed} failed:\n{process.stderr[-2000:]}", flush=True
        )
        return None
    return cast(dict[str, Any], json.loads(process.stdout.splitlines()[-1]))


def train_once(
    tail_loss: TailLoss, seed: int, pair: Pair, data: Path, sizes: TrainingSizes
) -> dict[str, Any]:
    """Train once and return {"kl": {step: exact KL}, "seconds", "ids", "bytes"}."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(pair.teacher, dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(pair.student, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=sizes.learning_rate, weight_decay=0.0, fused=True
    )
    questions = load_questions(data, tokenizer, sizes.held_out + sizes.steps * sizes.prompts)
    held_out, training = questions[: sizes.held_out], questions[sizes.held_out :]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    kl = {0: measure_kl(student, teacher, tokenizer, held_out, sizes.tokens)}
    began, measuring = time.monotonic(), 0.0
    for step in range(1, sizes.steps + 1):
        first = (step - 1) * sizes.prompts
        numbers = range(first, first + sizes.prompts)
        step_questions = [training[order[number]] for number in numbers]
        sampler = make_sampler(
            student, tokenizer, sizes.tokens, top_k=tail_loss.k or 1, draws=tail_loss.draws
        )
        (answers,) = sampler.generate(step_questions, numbers, seed=seed)
        student.train()
        loss = mean_loss(tail_loss, student, teacher, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if step in (sizes.steps // 2, sizes.steps):
            paused = time.monotonic()
            kl[step] = measure_kl(student, teacher, tokenizer, held_out, sizes.tokens)
            measuring += time.monotonic() - paused
    if tail_loss.tail is None and seed == 0:
        trained = pair.student.with_name(pair.student.name.replace("student", "trained"))
        student.save_pretrained(trained)
        tokenizer.save_pretrained(trained)
    seconds = time.monotonic() - began - measuring
    vocabulary = student.config.vocab_size
    return {
        "kl": kl,
        "seconds": seconds,
        "ids": tail_loss.ids(vocabulary),
        "bytes": tail_loss.bytes(vocabulary),
    }


def mean_loss(
    tail_loss: TailLoss, student: Any, teacher: Any, answers: Sequence[Rollout]
) -> Tensor:
    """Return the mean of the loss over all sampled tokens."""
    states, weight = hidden_states(student, answers), student.get_output_embeddings().weight
    with torch.no_grad():
        teacher_logits = compute_logits(teacher, hidden_states(teacher, answers))
    tokens = torch.cat([answer.completion for answer in answers])
    if tail_loss.tail is None:
        student_logits = compute_logits(student, states)
        return cast(Tensor, exact_kl(student_logits, teacher_logits, direction="reverse").mean())
    head = torch.cat([answer.head_ids for answer in answers]).long()
    draws = None
    if tail_loss.draws:
        draws = TailDraws.joined([answer.draws for answer in answers if answer.draws is not None])
    ids = None if draws is None else draws.ids.long()
    teacher_rows = rows_from_logits(teacher_logits, head, tokens, sample_ids=ids)
    in_head, tail = (head == tokens[:, None]).any(1), tail_loss.tail

    def compute_loss(rows: Rows, index: slice) -> Tensor:
        return topk_kl(
            rows, teacher_rows[index], in_head[index], direction="reverse", tail=tail,
            draw_logprobs=None if draws is None else draws.logprobs[index],
        )  # fmt: skip

    output = fused_linear_loss(states, weight, head, tokens, compute_loss, sample_ids=ids)
    return output.loss_sum / len(tokens)


if __name__ == "__main__":
    main()
