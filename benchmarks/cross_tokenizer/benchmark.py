"""A teacher with another tokenizer: our losses beside GOLD, ULD and the teacher's text alone.

    python -m benchmarks.cross_tokenizer --data train.jsonl [--seeds 3] [--quick]

SmolLM2-135M teaches a small student with a BPE tokenizer of its own; `material.py`
makes the pair, `losses.py` says what each loss is. Every way has the same student,
questions, number of steps and answers a step, AdamW, and the same two learning rates: the better
one of seed 0, by the metric that the way minimises, is used for the other seeds. Each run is added
to benchmarks/results/cross_tokenizer.json when it ends; an interrupted benchmark goes on where it
stopped. At the end it prints the table of docs/pairs.md and draws docs/cross_tokenizer.png. Takes
about half an hour on one core.

Metrics, of questions that no student was trained on:

bits    -log2 p of the teacher's answers, per byte, in the student's encoding
cost    log p - log q of answers that the student samples, per byte, in nats: the KL of strings,
        apart from the entropy of the spelling (`student_trainer/losses/cross_tokenizer.py`)
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
    encoded,
    logprobs,
    rows_of,
    stored_loss,
    uld_loss,
)
from benchmarks.cross_tokenizer.material import (
    QUICK,
    Material,
    Sizes,
    make_material,
    prompts,
    rollouts,
)
from benchmarks.cross_tokenizer.page import draw, table
from student_trainer.data.aligned import make_aligned_batch
from student_trainer.teachers.other_tokenizer_store import Match

RATES = (3e-4, 1e-3)
HELD_OUT_SEED = 10_000

Kind = Literal["word", "gold", "even gold", "stored", "cross-entropy", "uld"]


@dataclass(frozen=True)
class Way:
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
        """The metric that the way minimises."""
        return "cost" if self.samples else "bits"


WAYS = (
    Way("on-policy, words", "word"),
    Way("GOLD, on-policy", "gold"),
    Way("GOLD, on-policy, weights 1 and 1", "even gold"),
    Way("offline, rows", "stored"),
    Way("offline, chunks (ALM)", "stored", "chunk"),
    Way("offline, words (ALM)", "stored", "word"),
    Way("offline, chunks + cross-entropy", "stored", "chunk", 1.0),
    Way("cross-entropy of the teacher's text", "cross-entropy"),
    Way("ULD", "uld"),
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
    sizes = QUICK if options.quick else Sizes()
    material = make_material(options.data, options.work, options.models, sizes)
    results = Results(options.out, sizes)
    teaching = Teaching(material)
    if results.before is None:
        results.begin(teaching.measure(material.fresh_student()))
    # The offline ways first: their runs take seconds.
    for ways in ([way for way in WAYS if not way.samples], [way for way in WAYS if way.samples]):
        for way, rate in product(ways, RATES):
            results.run(teaching, way, rate, 0)
        for seed, way in product(range(1, 1 if options.quick else options.seeds), ways):
            results.run(teaching, way, results.better_rate(way), seed)
    found = json.loads(options.out.read_text())
    chosen = [(way.name, results.better_rate(way)) for way in WAYS]
    print(table(found, chosen))
    print(draw(found, chosen, options.docs / "cross_tokenizer.png"))


class Results:
    """The file of results. Each run is added as soon as it ends, so that a restart goes on."""

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self._path = path
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self._found.get("sizes") != vars(sizes):
            self._found = {"sizes": vars(sizes), "runs": []}

    @property
    def before(self) -> dict[str, float] | None:
        """The metrics of the student before any training."""
        return self._found.get("before")

    def begin(self, before: dict[str, float]) -> None:
        self._found["before"] = before
        self._write()

    def run(self, teaching: Teaching, way: Way, rate: float, seed: int) -> None:
        """Train once, unless the file has this run."""
        if self._of(way, rate, seed):
            return
        found = teaching.train(way, rate, seed)
        self._found["runs"].append({"way": way.name, "rate": rate, "seed": seed, **found})
        self._write()
        print(f"{way.name}, {rate:g}, seed {seed}: {found}", flush=True)

    def better_rate(self, way: Way) -> float:
        """Return the learning rate with the lower metric of seed 0."""
        return min(RATES, key=lambda rate: self._of(way, rate, 0)[0][way.metric])

    def _of(self, way: Way, rate: float, seed: int) -> list[dict[str, Any]]:
        key = (way.name, rate, seed)
        return [one for one in self._found["runs"] if (one["way"], one["rate"], one["seed"]) == key]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._found, indent=1) + "\n")
        partial.rename(self._path)


class Teaching:
    """Trains students and measures them."""

    def __init__(self, material: Material) -> None:
        self._material = material
        self._on_policy = OnPolicy(material)
        self._asked = prompts(material.student_words, material.questions)
        numbers = range(len(material.questions))
        matches: tuple[Match, ...] = ("row", "chunk", "word")
        self._encoded = {
            match: [encoded(material, number, match) for number in numbers] for match in matches
        }

    def train(self, way: Way, rate: float, seed: int) -> dict[str, float]:
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
            loss = self._loss(way, student, numbers, seed * sizes.steps + step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
        seconds = time.monotonic() - began
        return {**self.measure(student), "seconds": seconds}

    @torch.no_grad()
    def measure(self, student: Any) -> dict[str, float]:
        """Return both metrics on the held-out questions; the random numbers are always the same."""
        material = self._material
        numbers = range(material.sizes.held_out)
        scored = [self._encoded["chunk"][number] for number in numbers]
        batch = make_aligned_batch(scored, torch.device("cpu"), "padded")
        own = rows_of(logprobs(student.eval(), batch), batch).token_logprobs
        lengths = material.reads_teacher.writer.lengths
        size = sum(int(lengths[material.stored[number].ids.numpy()].sum()) for number in numbers)
        written = self._written(student, numbers, HELD_OUT_SEED)
        return {
            "bits": -float(own.double().sum()) / math.log(2) / size,
            "cost": self._on_policy.string_cost(student, written, numbers),
        }

    def _loss(self, way: Way, student: Any, numbers: Sequence[int], seed: int) -> Tensor:
        if way.samples:
            written = self._written(student, numbers, seed)
            if way.kind == "word":
                return self._on_policy.word(student, written, numbers)
            even = way.kind == "even gold"
            return self._on_policy.gold(student, written, numbers, even=even)
        scored = [self._encoded[way.match][number] for number in numbers]
        if way.kind == "uld":
            return uld_loss(student, scored, [self._material.stored[number] for number in numbers])
        match = way.match if way.kind == "stored" else None
        return stored_loss(student, scored, match, way.cross_entropy)

    def _written(self, student: Any, numbers: Sequence[int], seed: int) -> list[Any]:
        asked = [self._asked[number] for number in numbers]
        material = self._material
        sampler = rollouts(student, material.student_words, material.sizes.tokens)
        (written,) = sampler.generate(asked, list(numbers), seed=seed)
        return written


if __name__ == "__main__":
    main()
