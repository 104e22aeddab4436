"""Bias and noise of every tail estimator at equal numbers of ids and of bytes, on a real pair.

    python -m benchmarks.draws.noise --data train.jsonl --student runs/draws/real-trained

writes docs/draws.md, docs/draws.png and benchmarks/results/draw_noise.json. Positions: 192 tokens
that the student sampled in answers to questions of GSM8K. The pair is SmolLM2-135M-Instruct and a
student of 22 of its 30 layers (`benchmarks/shared/model_pairs.py`) after the training of
`benchmarks.draws.training`. The page also has a toy of random
logits (`benchmarks/loss/estimators.py`).

A sampled estimator has, per position, the gradient A + sum_i c(z_i) (e_(z_i) - b) in the logits,
where e_z is the unit vector of id z. Its mean and variance are sums over the vocabulary, and for
stratified draws an integral over their random number, so the figures have no sampling error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.draws.page import write_draws_page
from benchmarks.shared.evaluation import compute_logits, hidden_states
from benchmarks.shared.model_pairs import load_questions, make_pair, row_bytes
from student_trainer.losses import Direction, Rows, Tail, topk_kl
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler

BUDGETS = (8, 16, 32, 64, 128, 512)
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")


@dataclass(frozen=True)
class Estimator:
    """A tail mode with k head ids and M ids from the tail. stratified: how the student draws."""

    direction: Direction
    tail: Tail
    k: int
    draws: int = 0
    stratified: bool = True

    @property
    def bytes(self) -> float:
        """Bytes of one row on the wire, request and answer together."""
        by_student = self.direction == "reverse" or self.tail == "bucket+draws"
        return row_bytes(self.k, self.draws, head_by_student=by_student)


@dataclass(frozen=True)
class Position:
    """One position in float64: log-probs [V] of student and teacher."""

    log_p: Tensor
    log_q: Tensor

    def __post_init__(self) -> None:
        assert self.log_p.dtype == self.log_q.dtype == torch.float64


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of GSM8K")
    parser.add_argument("--work", type=Path, default=Path("runs/draws"))
    parser.add_argument("--student", type=Path, help="default: the untrained student")
    parser.add_argument("--positions", type=int, default=192)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draw_noise.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/draws.md"))
    options = parser.parse_args(arguments)
    pair = make_pair("real", options.work, options.data)
    real = sample_positions(
        pair.teacher, options.student or pair.student, options.data, options.positions
    )
    measurements = {
        name: measure_all(pair_positions)
        for name, pair_positions in (("pair", real), ("toy", make_toy_positions()))
    }
    result = {"positions": len(real), "vocabulary": len(real[0].log_p), **measurements}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.out}")
    print(write_draws_page(result, options.page))


def sample_positions(teacher: Path, student: Path, data: Path, count: int) -> list[Position]:
    """Return `count` positions of answers that the student samples, 16 of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (student, teacher)]
    rollouts = HuggingFaceRollouts(
        Sampler(models[0], tokenizer, top_k=1, temperature=1.0),
        max_new_tokens=64,
        batch_tokens=1 << 20,
    )
    questions = load_questions(data, tokenizer, count // 16)
    (answers,) = rollouts.generate(questions, range(len(questions)), seed=0)
    with torch.no_grad():
        student_logits, teacher_logits = (
            compute_logits(model, hidden_states(model, answers)) for model in models
        )
    indices = torch.linspace(0, len(student_logits) - 1, count).long()
    return [
        Position(p.double().log_softmax(0), q.double().log_softmax(0))
        for p, q in zip(student_logits[indices], teacher_logits[indices], strict=True)
    ]


def make_toy_positions(vocabulary: int = 1000, count: int = 16) -> list[Position]:
    """Return random positions: student logits of standard deviation 3, a teacher near it."""
    toy_positions = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        student = torch.randn(vocabulary, dtype=torch.float64, generator=generator) * 3
        noise = torch.randn(vocabulary, dtype=torch.float64, generator=generator)
        toy_positions.append(
            Position(student.log_softmax(0), (student + 0.8 * noise).log_softmax(0))
        )
    return toy_positions


def list_estimators(vocabulary: int) -> Iterator[Estimator]:
    """Yield every estimator, with k + M ids a row for each budget."""
    single: tuple[Tail, ...] = ("none", "bucket", "published", "sampled", "bucket+sampled")
    for direction in DIRECTIONS:
        for budget in (budget for budget in BUDGETS if budget < vocabulary):
            for tail in single:
                yield Estimator(direction, tail, budget)
            splits = [k for k in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256) if 0 < budget - k <= 256]
            for k in splits:
                if direction == "reverse":
                    yield Estimator(direction, "bucket+draws", k, budget - k)
                else:
                    yield Estimator(direction, "bucket+teacher_samples", k, budget - k)
    # The table of independent draws; stratified ones vary less.
    for k in (8, 64, 512):
        for draws in (1, 4, 16, 64):
            yield Estimator("reverse", "bucket+draws", k, draws, stratified=False)
            yield Estimator("reverse", "bucket+draws", k, draws)


def measure_all(positions: Sequence[Position]) -> list[dict[str, Any]]:
    """Return bias and standard deviation of each estimator, over the gradient's norm.

    Both are root mean squares over the positions, divided by that of the exact gradient.
    """
    measurements: dict[Estimator, list[tuple[float, float]]] = {}
    sizes: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
    tails: dict[int, float] = {}
    for number, position in enumerate(positions):
        for direction in DIRECTIONS:
            sizes[direction] += float(exact_gradient(position, direction).square().sum())
        for estimator in list_estimators(len(position.log_p)):
            measurements.setdefault(estimator, []).append(measure(position, estimator))
            if estimator.direction == "reverse" and estimator.tail == "none":
                mass = 1 - float(position.log_p.exp().topk(estimator.k).values.sum())
                tails[estimator.k] = tails.get(estimator.k, 0.0) + mass / len(positions)
        if number % 16 == 15:
            print(f"{number + 1} of {len(positions)} positions", flush=True)
    return [
        {
            **asdict(estimator),
            "bytes": estimator.bytes,
            "tail_mass": tails.get(estimator.k),
            "bias": (sum(bias for bias, _ in pairs) / sizes[estimator.direction]) ** 0.5,
            "sd": (sum(variance for _, variance in pairs) / sizes[estimator.direction]) ** 0.5,
        }
        for estimator, pairs in measurements.items()
    ]


def exact_gradient(position: Position, direction: Direction) -> Tensor:
    """Return the gradient [V] of the exact KL in the student's logits."""
    p, q = position.log_p.exp(), position.log_q.exp()
    if direction == "forward":
        return p - q
    gap = position.log_p - position.log_q
    return p * (gap - (p * gap).sum())


def measure(position: Position, estimator: Estimator) -> tuple[float, float]:
    """Return |bias|^2 and the variance (the mean |gradient - mean|^2) of one estimator."""
    order = position.log_p if estimator.direction == "reverse" else position.log_q
    head = order.topk(estimator.k).indices
    tail = torch.ones(len(order), dtype=torch.bool).index_fill_(0, head, False)
    mean = fixed_gradient(position, head, estimator)
    variance = 0.0
    if estimator.tail not in ("none", "bucket"):
        chance, factor, base = draw_terms(position, tail, estimator)
        share = chance * factor
        mean = mean + share - share.sum() * base
        if estimator.tail == "bucket+draws" and estimator.stratified and estimator.draws > 1:
            variance = stratified_variance(chance, factor, base, estimator.draws)
        else:
            squares = 1 - 2 * base + base.square().sum()
            expected = share - share.sum() * base
            draw_variance = (share * factor * squares).sum() - expected.square().sum()
            variance = float(draw_variance) / max(estimator.draws, 1)
    bias = mean - exact_gradient(position, estimator.direction)
    return float(bias.square().sum()), variance


def draw_terms(
    position: Position, tail: Tensor, estimator: Estimator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return chance [V], factor c [V] and base b [V]: z has the term c(z) (e_z - b).

    `tail` [V] bool: the ids outside the head. The terms follow from the table in `topk_kl`.
    """
    p, q = position.log_p.exp(), position.log_q.exp()
    p_tail, q_tail = (p * tail).sum(), (q * tail).sum()
    p_within, q_within = p * tail / p_tail, q * tail / q_tail
    log_ratio = position.log_p - position.log_q
    within = log_ratio - p_tail.log() + q_tail.log()
    w = (-log_ratio).exp()
    match estimator.tail, estimator.direction:
        case "bucket+sampled", "reverse":
            return p, tail * within, p
        case "bucket+draws", "reverse":
            return p_within, tail * p_tail * within, p
        case "sampled", "reverse":
            return p, tail * (log_ratio + 1), p
        case "published", "reverse":
            return p, tail * log_ratio, p
        case "bucket+sampled", "forward":
            return p, tail * -(w - q_tail / p_tail), p_within
        case "sampled", "forward":
            return p, tail * -w, p
        case "published", "forward":
            return p, tail * (1 - w), p
        case "bucket+teacher_samples", "forward":
            return q_within, tail * -q_tail, p_within
    raise AssertionError(estimator)


def stratified_variance(chance: Tensor, factor: Tensor, base: Tensor, draws: int) -> float:
    """Return the variance of the sum of one row's draws: an integral over its random number u.

    Draw i is the id at level (i + u) / draws of the cumulative `chance` [V]. The sum changes only
    where a level passes from an id to the next one, at the fractional part of draws * cumulative,
    so sorting these places gives the integrand everywhere.
    """
    ids = (chance > 0).nonzero().flatten()
    share, term, base_of = chance[ids], factor[ids] / draws, base[ids]
    ends = draws * share.cumsum(0)
    ends[-1] = draws
    counts = ends.ceil().diff(prepend=ends.new_zeros(1))  # draws of each id at u = 0
    places, order = (ends - ends.floor())[:-1].sort()
    # The number of draws of an id changes between floor and floor + 1 of its expectation.
    square = term.square() * (2 * (draws * share).floor() + 1)
    integrals = []
    for start, jump in (
        ((term.square() * counts.square()).sum(), square),
        ((term * counts).sum(), term),
        ((term * base_of * counts).sum(), term * base_of),
    ):
        jumps = (jump[1:] - jump[:-1])[order]
        integrals.append(start + torch.cat([jumps.new_zeros(1), jumps.cumsum(0)]))
    squares, total, weighted = integrals
    norm = squares - 2 * total * weighted + total.square() * base.square().sum()
    edges = torch.cat([places.new_zeros(1), places, places.new_ones(1)])
    mean = chance * factor - (chance * factor).sum() * base
    return float((norm * edges.diff()).sum() - mean.square().sum())


def fixed_gradient(position: Position, head: Tensor, estimator: Estimator) -> Tensor:
    """Return the gradient [V] of the part without samples: the head, and the bucket if any."""
    leaf = position.log_p.clone().requires_grad_()
    log_p = leaf.log_softmax(0)
    rows = [_head_rows(logprobs, head) for logprobs in (log_p, position.log_q)]
    mode: Tail = "bucket" if estimator.tail.startswith("bucket") else "none"
    token_in_head = torch.ones(1, dtype=torch.bool)
    value = topk_kl(rows[0], rows[1], token_in_head, direction=estimator.direction, tail=mode)
    return cast(Tensor, torch.autograd.grad(value.sum(), leaf)[0])


def _head_rows(logprobs: Tensor, head: Tensor) -> Rows:
    tail_logprobs = logprobs.index_fill(0, head, -torch.inf)
    return Rows(logprobs[head][None], tail_logprobs.logsumexp(0)[None], logprobs[:1])


if __name__ == "__main__":
    main()
