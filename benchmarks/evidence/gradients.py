"""Bias and noise of the gradient of every tail mode, by k, entropy and place in the answer.

    python -m benchmarks.evidence.gradients --data train.jsonl --trained STUDENT

STUDENT: the export of `make demo-real`, runs/demo-real/on-policy/*/export.

SmolLM2-135M-Instruct teaches a cut of itself (`benchmarks/shared/model_pairs.py`; 49,152 ids).
Positions are tokens of answers to questions of GSM8K that the student samples, of the student
before training and of one after 40 on-policy steps (`make demo-real`). Bias and variance are sums
over the vocabulary (`benchmarks/draws/noise.py`), so they have no sampling error; the 95% intervals
are over answers (bootstrap). `renormalised` is the KL of both distributions cut to the head and
divided by its mass. Writes benchmarks/results/evidence_gradients.json. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.draws.noise import Estimator, Position, exact_gradient, measure
from benchmarks.shared.evaluation import compute_logits, hidden_states
from benchmarks.shared.model_pairs import load_questions, make_pair
from benchmarks.shared.results import RESULTS, describe_machine, format_json
from student_trainer.losses import Direction
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

KS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
DRAWS = 8
ANSWERS, TOKENS, EVERY = 32, 64, 8  # a position in eight tokens
RENORMALISED = "renormalised"


@dataclass(frozen=True)
class AnswerPosition:
    """A position: log-probs in float64, the answer's number, and the token's number in it."""

    position: Position
    answer: int
    token: int

    @property
    def entropy(self) -> float:
        """Of the student, in nats."""
        log_p = self.position.log_p
        return float(-(log_p.exp() * log_p).sum())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--trained", type=Path, required=True, help="a trained student")
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_gradients.json")
    options = parser.parse_args(arguments)
    pair = make_pair("real", options.work, options.data)
    groups: list[dict[str, Any]] = []
    for name, student in (("before", pair.student), ("after 40 steps", options.trained)):
        answer_places = sample_places(pair.teacher, student, options.data, options.answers)
        groups += [{"student": name, **group} for group in summarize_groups(answer_places)]
        print(f"{name}: {len(answer_places)} positions", flush=True)
    result = {"machine": describe_machine(), "draws": DRAWS, "groups": groups}
    options.out.write_text(format_json(result))


def sample_places(teacher: Path, student: Path, data: Path, answers: int) -> list[AnswerPosition]:
    """Return every EVERY-th token of the answers that the student samples."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (student, teacher)
    ]
    rollouts = HuggingFaceRollouts(
        Sampler(models[0], tokenizer, top_k=1, temperature=1.0),
        max_new_tokens=TOKENS,
        batch_tokens=1 << 20,
    )
    questions = load_questions(data, tokenizer, answers)
    (sampled,) = rollouts.generate(questions, range(len(questions)), seed=0)
    answer_places: list[AnswerPosition] = []
    for number, answer in enumerate(sampled):
        with torch.no_grad():
            student_logits, teacher_logits = (
                compute_logits(model, hidden_states(model, [answer])) for model in models
            )
        for token in range(number % EVERY, len(student_logits), EVERY):
            p, q = (
                logits[token].double().log_softmax(0) for logits in (student_logits, teacher_logits)
            )
            answer_places.append(AnswerPosition(Position(p, q), number, token))
    return answer_places


def summarize_groups(answer_places: Sequence[AnswerPosition]) -> Iterator[dict[str, Any]]:
    """Yield bias and sd of each estimator over all positions, by entropy and by place.

    Both are root mean squares over the positions, divided by that of the exact gradient.
    """
    rows = [row for place in answer_places for row in measure_place(place)]
    entropies = np.quantile([place.entropy for place in answer_places], [1 / 3, 2 / 3])
    groups: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda row: True,
        "lowest third of entropy": lambda row: row["entropy"] <= entropies[0],
        "highest third of entropy": lambda row: row["entropy"] > entropies[1],
        "tokens 1 to 16": lambda row: row["token"] < 16,
        "tokens 33 to 64": lambda row: row["token"] >= 32,
    }
    kinds: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["direction"], row["tail"], row["k"]), []).append(row)
    for group, is_in_group in groups.items():
        for (direction, tail, k), kind_rows in kinds.items():
            group_rows = [row for row in kind_rows if is_in_group(row)]
            yield {
                "group": group,
                "direction": direction,
                "tail": tail,
                "k": k,
                "positions": len(group_rows),
                "tail_mass": sum(row["tail_mass"] for row in group_rows) / len(group_rows),
                "bias": ratio_and_interval(group_rows, "bias"),
                "sd": ratio_and_interval(group_rows, "variance"),
            }


def ratio_and_interval(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return the root of sum(name) / sum(exact), and its 95% interval over answers (bootstrap)."""
    answers = sorted({row["answer"] for row in rows})
    sums = np.array(
        [
            [
                sum(row[column] for row in rows if row["answer"] == answer)
                for column in (name, "exact")
            ]
            for answer in answers
        ]
    )
    resampled = np.random.default_rng(0).integers(0, len(answers), (1000, len(answers)))
    resampled_sums = sums[resampled].sum(1)
    low, high = np.quantile(np.sqrt(resampled_sums[:, 0] / resampled_sums[:, 1]), [0.025, 0.975])
    return [float(np.sqrt(sums[:, 0].sum() / sums[:, 1].sum())), float(low), float(high)]


def list_estimators() -> Iterator[Estimator]:
    for k in KS:
        for tail in ("none", "bucket", "published", "sampled", "bucket+sampled"):
            yield Estimator("reverse", tail, k)
            yield Estimator("forward", tail, k)
        yield Estimator("reverse", "bucket+draws", k, DRAWS)
        yield Estimator("forward", "bucket+teacher_samples", k, DRAWS)


def measure_place(place: AnswerPosition) -> Iterator[dict[str, Any]]:
    """Yield |bias|^2, variance and |exact gradient|^2 of every estimator at one position."""
    position = place.position
    p = position.log_p.exp()
    facts = {"answer": place.answer, "token": place.token, "entropy": place.entropy}
    sizes = {direction: exact_gradient(position, direction) for direction in ("reverse", "forward")}
    mass = p.topk(KS[-1]).values.cumsum(0)
    for estimator in list_estimators():
        bias, variance = measure(position, estimator)
        size = float(sizes[estimator.direction].square().sum())
        yield {
            **facts,
            "direction": estimator.direction,
            "tail": estimator.tail,
            "k": estimator.k,
            "tail_mass": 1 - float(mass[estimator.k - 1]),
            "bias": bias,
            "variance": variance,
            "exact": size,
        }
    for direction, exact in sizes.items():
        for k in KS:
            gradient = renormalised_gradient(position, direction, k)  # type: ignore[arg-type]
            yield {
                **facts,
                "direction": direction,
                "tail": RENORMALISED,
                "k": k,
                "tail_mass": 1 - float(mass[k - 1]),
                "bias": float((gradient - exact).square().sum()),
                "variance": 0.0,
                "exact": float(exact.square().sum()),
            }


def renormalised_gradient(position: Position, direction: Direction, k: int) -> Tensor:
    """Return the gradient [V] in the student's logits of the KL of the renormalised heads."""
    order = position.log_p if direction == "reverse" else position.log_q
    head = order.topk(k).indices
    log_p, log_q = position.log_p[head].log_softmax(0), position.log_q[head].log_softmax(0)
    p, gap = log_p.exp(), log_p - log_q
    inner = p - log_q.exp() if direction == "forward" else p * (gap - (p * gap).sum())
    return torch.zeros_like(position.log_p).index_copy_(0, head, inner)


if __name__ == "__main__":
    main()
