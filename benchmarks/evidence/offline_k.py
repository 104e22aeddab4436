"""Offline distillation at a real vocabulary: every tail mode at k = 1, 8 and 64, forward KL.

    python -m benchmarks.evidence.offline_k --data train.jsonl [--seeds 3] [--processes 2]

SmolLM2-135M-Instruct teaches a cut of itself (`benchmarks/shared/model_pairs.py`; 49,152 ids) on
the reference answers of GSM8K: 24 steps of 4 texts, AdamW. Held out: the exact KL(teacher||student)
a token of 24 other answers, in nats, and their perplexity. `renormalised`: the KL of both
distributions cut to the head and divided by its mass, which several trainers use. Each run is added
to benchmarks/results/evidence_offline_k.json when it ends; an interrupted benchmark goes on where
it stopped. A run takes about two minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.evaluation import compute_logits
from benchmarks.shared.model_pairs import Pair, make_pair
from benchmarks.shared.programs import one_thread_environment
from benchmarks.shared.results import RESULTS, add_run, describe_machine, load_results
from student_trainer.losses import (
    Rows,
    Tail,
    exact_kl,
    fused_linear_loss,
    rows_from_logits,
    topk_kl,
)

STEPS, TEXTS, LONGEST, HELD_OUT, RATE = 24, 4, 160, 24, 1e-4
SAMPLES = 8


@dataclass(frozen=True)
class Way:
    """A loss: a tail mode with k ids, or one of `exact`, `cross-entropy` and `before`."""

    loss: str
    k: int = 0

    @property
    def name(self) -> str:
        return f"{self.loss}, k = {self.k}" if self.k else self.loss


LOSSES = ("bucket+teacher_samples", "bucket", "none", "renormalised")
WAYS = (
    Way("before"),
    Way("exact"),
    *(Way(loss, k) for k in (8, 1, 64) for loss in LOSSES if (loss, k) != ("renormalised", 1)),
    Way("cross-entropy"),
)


@dataclass(frozen=True)
class Text:
    """Token ids of a question and its answer; the first row is that of token `start`."""

    ids: Tensor
    start: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_offline_k.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--one", type=int, nargs=2, metavar=("WAY", "SEED"), help="one run only")
    options = parser.parse_args(arguments)
    pair = make_pair("real", options.work, options.data)
    if options.one:
        way, seed = options.one
        print(json.dumps(train(WAYS[way], seed, pair, options.data, options.steps)))
        return
    result = load_results(options.out, {"machine": describe_machine(), "steps": options.steps})
    keys = [(seed, way) for seed in range(options.seeds) for way in range(len(WAYS))]

    def add(seed: int, way: int) -> None:
        key = {"way": WAYS[way].name, "seed": seed}
        if any(run | key == run for run in result["runs"]):
            return
        command = [sys.executable, "-m", "benchmarks.evidence.offline_k"]
        command += [*(arguments or sys.argv[1:]), "--one", str(way), str(seed)]
        done = subprocess.run(command, env=one_thread_environment(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        run = key | json.loads(done.stdout.splitlines()[-1])
        add_run(options.out, result, run)
        print(run, flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda one: add(*one), keys))


def train(way: Way, seed: int, pair: Pair, data: Path, steps: int) -> dict[str, Any]:
    """Train once; return the exact KL and the perplexity held out."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
        for one in (pair.teacher, pair.student)
    )
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    known = texts(data, tokenizer, HELD_OUT + steps * TEXTS)
    held_out, training = known[:HELD_OUT], known[HELD_OUT:]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    began = time.monotonic()
    for step in range(0 if way.loss == "before" else steps):
        chosen = [training[order[step * TEXTS + number]] for number in range(TEXTS)]
        student.train()
        loss = loss_of(way, student, teacher, chosen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
    seconds = time.monotonic() - began
    return measure(student.eval(), teacher, held_out) | {"seconds": seconds}


def texts(data: Path, tokenizer: Any, count: int) -> list[Text]:
    """Return the first `count` questions with their answers of at most LONGEST tokens together."""
    found: list[Text] = []
    for line in data.read_text().splitlines():
        record = json.loads(line)
        start = len(tokenizer(f"{record['question']}\n")["input_ids"])
        ids = tokenizer(f"{record['question']}\n{record['answer']}")["input_ids"]
        if len(ids) <= LONGEST:
            found.append(Text(torch.tensor(ids), start))
        if len(found) == count:
            return found
    raise SystemExit(f"{data} has {len(found)} texts of {LONGEST} tokens, not {count}")


def states(model: Any, of: Sequence[Text]) -> Tensor:
    """Return the states [N, H] from which the tokens of all answers are predicted."""
    # Padding at the end does not change the outputs of a causal model before it.
    ids = torch.nn.utils.rnn.pad_sequence([one.ids for one in of], batch_first=True)
    found = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([found[row, one.start - 1 : len(one.ids) - 1] for row, one in enumerate(of)])


def loss_of(way: Way, student: Any, teacher: Any, of: Sequence[Text]) -> Tensor:
    """Return the mean of the loss over all tokens of the answers."""
    ours = states(student, of)
    tokens = torch.cat([one.ids[one.start :] for one in of])
    if way.loss == "cross-entropy":
        return torch.nn.functional.cross_entropy(compute_logits(student, ours), tokens)
    with torch.no_grad():
        theirs = compute_logits(teacher, states(teacher, of))
    if way.loss == "exact":
        kl = exact_kl(compute_logits(student, ours), theirs, direction="forward")
        return cast(Tensor, kl.mean())
    head = theirs.topk(way.k).indices
    samples = tail_samples(theirs, head) if way.loss == "bucket+teacher_samples" else None
    rows = rows_from_logits(theirs, head, tokens, sample_ids=samples)
    in_head = (head == tokens[:, None]).any(1)

    def of_rows(mine: Rows, index: Any) -> Tensor:
        if way.loss == "renormalised":
            p, q = mine.head_logprobs.log_softmax(1), rows[index].head_logprobs.log_softmax(1)
            return (q.exp() * (q - p)).sum(1)
        return topk_kl(
            mine, rows[index], in_head[index], direction="forward", tail=cast(Tail, way.loss)
        )

    weight = student.get_output_embeddings().weight
    out = fused_linear_loss(ours, weight, head, tokens, of_rows, sample_ids=samples)
    return out.loss_sum / len(tokens)


def tail_samples(theirs: Tensor, head: Tensor) -> Tensor:
    """Return SAMPLES ids [N, M] that the teacher with logits [N, V] draws outside the head."""
    rest = theirs.scatter(1, head, -torch.inf).softmax(1)
    return torch.multinomial(rest, SAMPLES, replacement=True)


@torch.no_grad()
def measure(student: Any, teacher: Any, held_out: Sequence[Text]) -> dict[str, float]:
    """Return the exact KL(teacher||student) a token, in nats, and the student's perplexity."""
    kl = loss = count = 0.0
    for first in range(0, len(held_out), 8):
        part = held_out[first : first + 8]
        ours, theirs = (compute_logits(model, states(model, part)) for model in (student, teacher))
        tokens = torch.cat([one.ids[one.start :] for one in part])
        kl += float(exact_kl(ours, theirs, direction="forward").double().sum())
        loss += float(torch.nn.functional.cross_entropy(ours, tokens, reduction="sum"))
        count += len(tokens)
    return {"kl": kl / count, "perplexity": math.exp(loss / count)}


if __name__ == "__main__":
    main()
