"""Offline distillation at a real vocabulary: every tail mode at k = 1, 8 and 64, forward KL.

    python -m benchmarks.evidence.offline_k --data train.jsonl [--seeds 3] [--processes 2]

SmolLM2-135M-Instruct teaches a cut of itself (`benchmarks/shared/model_pairs.py`; 49,152 ids) on
the reference answers of GSM8K: 24 steps of 4 texts, AdamW. Held out: the exact KL(teacher||student)
a token of 24 other answers, in nats, and their perplexity. `renormalised`: the KL of both
distributions cut to the head and divided by its mass, which several trainers use. Each run is added
to benchmarks/results/evidence_offline_k.json when it ends; an interrupted benchmark resumes
there. A run takes about two minutes of a core.
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
class OfflineLoss:
    """A loss: a tail mode with k ids, or one of `exact`, `cross-entropy` and `before`."""

    loss: str
    k: int = 0

    @property
    def name(self) -> str:
        return f"{self.loss}, k = {self.k}" if self.k else self.loss


TAIL_LOSSES = ("bucket+teacher_samples", "bucket", "none", "renormalised")
OFFLINE_LOSSES = (
    OfflineLoss("before"),
    OfflineLoss("exact"),
    *(
        OfflineLoss(loss, k)
        for k in (8, 1, 64)
        for loss in TAIL_LOSSES
        if (loss, k) != ("renormalised", 1)
    ),
    OfflineLoss("cross-entropy"),
)


@dataclass(frozen=True)
class QuestionAnswer:
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
        loss_number, seed = options.one
        print(
            json.dumps(train(OFFLINE_LOSSES[loss_number], seed, pair, options.data, options.steps))
        )
        return
    result = load_results(options.out, {"machine": describe_machine(), "steps": options.steps})
    keys = [
        (seed, loss_number)
        for seed in range(options.seeds)
        for loss_number in range(len(OFFLINE_LOSSES))
    ]

    def add(seed: int, loss_number: int) -> None:
        key = {"way": OFFLINE_LOSSES[loss_number].name, "seed": seed}
        if any(run | key == run for run in result["runs"]):
            return
        command = [sys.executable, "-m", "benchmarks.evidence.offline_k"]
        command += [*(arguments or sys.argv[1:]), "--one", str(loss_number), str(seed)]
        process = subprocess.run(
            command, env=one_thread_environment(), capture_output=True, text=True
        )
        if process.returncode:
            raise SystemExit(process.stderr[-3000:])
        run = key | json.loads(process.stdout.splitlines()[-1])
        add_run(options.out, result, run)
        print(run, flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda seed_and_loss: add(*seed_and_loss), keys))


def train(
    offline_loss: OfflineLoss, seed: int, pair: Pair, data: Path, steps: int
) -> dict[str, Any]:
    """Train once; return the exact KL and the perplexity held out."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(pair.teacher)
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (pair.teacher, pair.student)
    )
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    all_texts = load_texts(data, tokenizer, HELD_OUT + steps * TEXTS)
    held_out, training = all_texts[:HELD_OUT], all_texts[HELD_OUT:]
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    began = time.monotonic()
    for step in range(0 if offline_loss.loss == "before" else steps):
        step_texts = [training[order[step * TEXTS + number]] for number in range(TEXTS)]
        student.train()
        loss = mean_loss(offline_loss, student, teacher, step_texts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
    seconds = time.monotonic() - began
    return measure(student.eval(), teacher, held_out) | {"seconds": seconds}


def load_texts(data: Path, tokenizer: Any, count: int) -> list[QuestionAnswer]:
    """Return the first `count` questions with their answers of at most LONGEST tokens together."""
    short_texts: list[QuestionAnswer] = []
    for line in data.read_text().splitlines():
        record = json.loads(line)
        start = len(tokenizer(f"{record['question']}\n")["input_ids"])
        ids = tokenizer(f"{record['question']}\n{record['answer']}")["input_ids"]
        if len(ids) <= LONGEST:
            short_texts.append(QuestionAnswer(torch.tensor(ids), start))
        if len(short_texts) == count:
            return short_texts
    raise SystemExit(f"{data} has {len(short_texts)} texts of {LONGEST} tokens, not {count}")


def answer_states(model: Any, texts: Sequence[QuestionAnswer]) -> Tensor:
    """Return the states [N, H] from which the tokens of all answers are predicted."""
    # Padding at the end does not change the outputs of a causal model before it.
    ids = torch.nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    padded_states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(
        [padded_states[row, text.start - 1 : len(text.ids) - 1] for row, text in enumerate(texts)]
    )


def mean_loss(
    offline_loss: OfflineLoss, student: Any, teacher: Any, texts: Sequence[QuestionAnswer]
) -> Tensor:
    """Return the mean of the loss over all tokens of the answers."""
    student_states = answer_states(student, texts)
    tokens = torch.cat([text.ids[text.start :] for text in texts])
    if offline_loss.loss == "cross-entropy":
        return torch.nn.functional.cross_entropy(compute_logits(student, student_states), tokens)
    with torch.no_grad():
        teacher_logits = compute_logits(teacher, answer_states(teacher, texts))
    if offline_loss.loss == "exact":
        kl = exact_kl(compute_logits(student, student_states), teacher_logits, direction="forward")
        return cast(Tensor, kl.mean())
    head = teacher_logits.topk(offline_loss.k).indices
    samples = (
        draw_tail_samples(teacher_logits, head)
        if offline_loss.loss == "bucket+teacher_samples"
        else None
    )
    rows = rows_from_logits(teacher_logits, head, tokens, sample_ids=samples)
    in_head = (head == tokens[:, None]).any(1)

    def compute_loss(student_rows: Rows, index: Any) -> Tensor:
        if offline_loss.loss == "renormalised":
            p, q = (
                student_rows.head_logprobs.log_softmax(1),
                rows[index].head_logprobs.log_softmax(1),
            )
            return (q.exp() * (q - p)).sum(1)
        return topk_kl(
            student_rows,
            rows[index],
            in_head[index],
            direction="forward",
            tail=cast(Tail, offline_loss.loss),
        )

    weight = student.get_output_embeddings().weight
    output = fused_linear_loss(
        student_states, weight, head, tokens, compute_loss, sample_ids=samples
    )
    return output.loss_sum / len(tokens)


def draw_tail_samples(teacher_logits: Tensor, head: Tensor) -> Tensor:
    """Return SAMPLES ids [N, M] that the teacher with logits [N, V] draws outside the head."""
    tail_probabilities = teacher_logits.scatter(1, head, -torch.inf).softmax(1)
    return torch.multinomial(tail_probabilities, SAMPLES, replacement=True)


@torch.no_grad()
def measure(student: Any, teacher: Any, held_out: Sequence[QuestionAnswer]) -> dict[str, float]:
    """Return the exact KL(teacher||student) a token, in nats, and the student's perplexity."""
    kl = loss = count = 0.0
    for first in range(0, len(held_out), 8):
        part = held_out[first : first + 8]
        student_logits, teacher_logits = (
            compute_logits(model, answer_states(model, part)) for model in (student, teacher)
        )
        tokens = torch.cat([text.ids[text.start :] for text in part])
        kl += float(exact_kl(student_logits, teacher_logits, direction="forward").double().sum())
        loss += float(torch.nn.functional.cross_entropy(student_logits, tokens, reduction="sum"))
        count += len(tokens)
    return {"kl": kl / count, "perplexity": math.exp(loss / count)}


if __name__ == "__main__":
    main()
