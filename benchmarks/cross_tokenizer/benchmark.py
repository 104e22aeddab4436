"""A teacher with another tokenizer: our losses against GOLD, ULD and cross-entropy.

    python -m benchmarks.cross_tokenizer --data train.jsonl [--seeds 3] [--quick]

SmolLM2-135M teaches a small student with a BPE tokenizer of its own; `material.py`
makes the pair, `losses.py` says what each loss is. Every loss has the same student,
questions, number of steps and answers a step, AdamW, and the same two learning rates: the better
one of seed 0, by the metric that the loss minimises, is used for the other seeds. Each run is added
to benchmarks/results/cross_tokenizer.json when it ends; an interrupted benchmark resumes
there. At the end it prints the table of docs/pairs.md and draws docs/cross_tokenizer.png. Takes
about half an hour on one core.

Metrics, of questions that no student was trained on:

bits    -log2 p of the teacher's answers, per byte, in the student's encoding
cost    log p - log q of answers that the student samples, per byte, in nats: the KL of strings,
        apart from the entropy of the spelling (`student_trainer/cross_tokenizer/losses.py`)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.cross_tokenizer.losses import (
    OnPolicy,
    encode_stored_answer,
    rows_of_table,
    stored_loss,
    student_logprobs,
    uld_loss,
)
from benchmarks.cross_tokenizer.material import (
    QUICK,
    CrossTokenizerMaterial,
    CrossTokenizerSizes,
    make_material,
    make_prompts,
)
from benchmarks.cross_tokenizer.page import draw, format_losses
from benchmarks.shared.evaluation import HELD_OUT_SEED, make_sampler
from student_trainer.cross_tokenizer.aligned_rows import make_aligned_batch
from student_trainer.cross_tokenizer.store import Match

RATES = (3e-4, 1e-3)

Kind = Literal["word", "gold", "even gold", "stored", "cross-entropy", "uld"]


@dataclass(frozen=True)
class TokenizerLoss:
    """A loss. match, cross_entropy: of the kind "stored", as in a job."""

    name: str
    kind: Kind
    match: Match = "row"
    cross_entropy: float = 0.0

    @property
    def samples(self) -> bool:
        """Whether the student samples the answers."""
        return self.kind in ("word", "gold", "even gold")

    @property
    def metric(self) -> str:
        """The metric that the loss minimises."""
        return "cost" if self.samples else "bits"


LOSSES = (
    TokenizerLoss("on-policy, words", "word"),
    TokenizerLoss("GOLD, on-policy", "gold"),
    TokenizerLoss("GOLD, on-policy, weights 1 and 1", "even gold"),
    TokenizerLoss("offline, rows", "stored"),
    TokenizerLoss("offline, chunks (ALM)", "stored", "chunk"),
    TokenizerLoss("offline, words (ALM)", "stored", "word"),
    TokenizerLoss("offline, chunks + cross-entropy", "stored", "chunk", 1.0),
    TokenizerLoss("cross-entropy of the teacher's text", "cross-entropy"),
    TokenizerLoss("ULD", "uld"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/cross-tokenizer"), help="kept")
    parser.add_argument("--models", type=Path, default=Path("runs/draws"), help="kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cross_tokenizer.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two steps, one seed, for tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else CrossTokenizerSizes()
    material = make_material(options.data, options.work, options.models, sizes)
    results = LossResults(options.out, sizes)
    teaching = StudentTraining(material)
    if results.before is None:
        results.begin(teaching.measure(material.fresh_student()))
    # The offline losses first: their runs take seconds.
    for losses in (
        [loss for loss in LOSSES if not loss.samples],
        [loss for loss in LOSSES if loss.samples],
    ):
        for loss, rate in product(losses, RATES):
            results.run(teaching, loss, rate, 0)
        for seed, loss in product(range(1, 1 if options.quick else options.seeds), losses):
            results.run(teaching, loss, results.better_rate(loss), seed)
    result = json.loads(options.out.read_text())
    chosen_rates = [(loss.name, results.better_rate(loss)) for loss in LOSSES]
    print(format_losses(result, chosen_rates))
    print(draw(result, chosen_rates, options.docs / "cross_tokenizer.png"))


class LossResults:
    """The file of results. Each run is added when it ends, so that a restart resumes."""

    def __init__(self, path: Path, sizes: CrossTokenizerSizes) -> None:
        self._path = path
        self._result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self._result.get("sizes") != vars(sizes):
            self._result = {"sizes": vars(sizes), "runs": []}

    @property
    def before(self) -> dict[str, float] | None:
        """The metrics of the student before any training."""
        return self._result.get("before")

    def begin(self, before: dict[str, float]) -> None:
        self._result["before"] = before
        self._write()

    def run(self, teaching: StudentTraining, loss: TokenizerLoss, rate: float, seed: int) -> None:
        """Train once, unless the file has this run."""
        if self._runs_of(loss, rate, seed):
            return
        metrics = teaching.train(loss, rate, seed)
        self._result["runs"].append({"way": loss.name, "rate": rate, "seed": seed, **metrics})
        self._write()
        print(f"{loss.name}, {rate:g}, seed {seed}: {metrics}", flush=True)

    def better_rate(self, loss: TokenizerLoss) -> float:
        """Return the learning rate with the lower metric of seed 0."""
        return min(RATES, key=lambda rate: self._runs_of(loss, rate, 0)[0][loss.metric])

    def _runs_of(self, loss: TokenizerLoss, rate: float, seed: int) -> list[dict[str, Any]]:
        key = (loss.name, rate, seed)
        return [
            run for run in self._result["runs"] if (run["way"], run["rate"], run["seed"]) == key
        ]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._result, indent=1) + "\n")
        partial.rename(self._path)


class StudentTraining:
    """Trains students and measures them."""

    def __init__(self, material: CrossTokenizerMaterial) -> None:
        self._material = material
        self._on_policy = OnPolicy(material)
        self._questions = make_prompts(material.student_words, material.questions)
        numbers = range(len(material.questions))
        matches: tuple[Match, ...] = ("row", "chunk", "word")
        self._stored_answers = {
            match: [encode_stored_answer(material, number, match) for number in numbers]
            for match in matches
        }

    def train(self, loss: TokenizerLoss, rate: float, seed: int) -> dict[str, float]:
        """Return the metrics after the last step, and the seconds of the steps."""
        torch.manual_seed(seed)
        material, sizes = self._material, self._material.sizes
        student = material.fresh_student()
        optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.0)
        order = torch.randperm(sizes.questions).tolist()
        began = time.monotonic()
        for step in range(sizes.steps):
            first = step * sizes.batch
            numbers = [
                sizes.held_out + order[place % len(order)]
                for place in range(first, first + sizes.batch)
            ]
            loss_value = self._loss(loss, student, numbers, seed * sizes.steps + step)
            optimizer.zero_grad()
            loss_value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
        seconds = time.monotonic() - began
        return {**self.measure(student), "seconds": seconds}

    @torch.no_grad()
    def measure(self, student: Any) -> dict[str, float]:
        """Return both metrics on the held-out questions; the random numbers are always the same."""
        material = self._material
        numbers = range(material.sizes.held_out)
        scored = [self._stored_answers["chunk"][number] for number in numbers]
        batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
        token_logprobs = rows_of_table(
            student_logprobs(student.eval(), batch), batch
        ).token_logprobs
        lengths = material.reads_teacher.writer.lengths
        size = sum(int(lengths[material.stored[number].ids.numpy()].sum()) for number in numbers)
        answers = self._sample_answers(student, numbers, HELD_OUT_SEED)
        return {
            "bits": -float(token_logprobs.double().sum()) / math.log(2) / size,
            "cost": self._on_policy.string_cost(student, answers, numbers),
        }

    def _loss(self, loss: TokenizerLoss, student: Any, numbers: Sequence[int], seed: int) -> Tensor:
        if loss.samples:
            answers = self._sample_answers(student, numbers, seed)
            if loss.kind == "word":
                return self._on_policy.word(student, answers, numbers)
            even = loss.kind == "even gold"
            return self._on_policy.gold(student, answers, numbers, even=even)
        scored = [self._stored_answers[loss.match][number] for number in numbers]
        if loss.kind == "uld":
            return uld_loss(student, scored, [self._material.stored[number] for number in numbers])
        match = loss.match if loss.kind == "stored" else None
        return stored_loss(student, scored, match, loss.cross_entropy)

    def _sample_answers(self, student: Any, numbers: Sequence[int], seed: int) -> list[Any]:
        prompts = [self._questions[number] for number in numbers]
        material = self._material
        sampler = make_sampler(student, material.student_words, material.sizes.tokens)
        (answers,) = sampler.generate(prompts, list(numbers), seed=seed)
        return answers


if __name__ == "__main__":
    main()
