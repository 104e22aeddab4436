"""Bias and standard deviation of every KL estimator, by a sum over every token.

    python -m benchmarks.loss.estimators [--vocabulary 1000]

writes docs/estimators.md, the same figures as benchmarks/results/estimators.json, and, where
matplotlib is installed, docs/estimators.png. The problem: student logits of standard deviation 3,
a teacher near it, on-policy samples, float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.loss.estimator_picture import draw
from benchmarks.shared.pages import format_table, write_page
from student_trainer.losses import Direction, Tail, exact_kl, rows_from_logits, topk_kl

SIZES = (1, 8, 32, 128)
TAILS: tuple[Tail, ...] = get_args(Tail)

PAGE = """\
# Estimators: bias and standard deviation

`python -m benchmarks.loss.estimators` computes these figures by sums over every token of a
vocabulary of {vocabulary} ids in float64, without sampling error. The student's logits have a
standard deviation of 3, and the teacher's logits are near the student's. Samples are on-policy. The
head is the top-k of the student (reverse KL) or of the teacher (forward KL).

- *Value bias* is |E[estimate] - KL| / KL.
- *Gradient bias* is |E[grad] - grad KL| / |grad KL|, with norms over the student's logits.
- *Gradient sd* is the root mean squared distance between one token's gradient and the mean
  gradient, divided by |grad KL|.

Values below 1e-12 are shown as 0.

![Gradient bias and standard deviation by tail mode](estimators.png)

## Summary

The standard deviation of a mean over n tokens falls with the square root of n; the bias does not.

- `none` and `bucket` have no variance, but a bias that remains until the head has nearly all of
  the mass.
- `bucket+sampled` has no bias at any k. Its standard deviation is {published} times that of
  `published`.
- `sampled` has no bias. Its standard deviation is {sampled} times that of `bucket+sampled`.
- `bucket+draws` has no bias. With one draw per row, its standard deviation is {draws} times that of
  `bucket+sampled`, because a draw is always in the tail, and the sampled token is not. M
  independent draws divide the standard deviation by the square root of M; stratified draws usually
  by more. The figures for forward KL assume that the teacher's head is known at the time of the
  draw.
- `bucket+teacher_samples` needs no token sampled by the student; use this mode for stored rows.
  With one sample per row, its standard deviation is {teacher_samples} times that of
  `bucket+sampled`. M samples divide the standard deviation by the square root of M.

## Erratum to the published algorithm

EMA-PG (arXiv 2602.04417) states that the gradient of its Algorithms 1 and 2 is unbiased at any k.
The value is unbiased, but the gradient is biased for 0 < k < V. The bias is
exactly the gradient of the student's mass in the head, grad P_S: +grad P_S for reverse KL, which
moves mass out of the head, and -grad P_S for forward KL. In these figures, the bias of `published`
equals this formula within {head_mass_distance:.0e} of |grad KL|.

## Figures

{table}
"""

COLUMNS = (
    *("direction", "k", "student's tail mass", "`tail`"),
    *("value bias", "gradient bias", "gradient sd"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/estimators.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/estimators.md"))
    options = parser.parse_args(arguments)
    directions: tuple[Direction, ...] = ("reverse", "forward")
    rows = [
        row
        for direction in directions
        for k in SIZES
        for row in measure(options.vocabulary, k, direction)
    ]
    result = {"vocabulary": options.vocabulary, "rows": rows}
    for path, text in (
        (options.out, json.dumps(result, indent=1)),
        (options.page, format_page(result)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        print(write_page(path, text))
    print(draw(rows, TAILS, options.page.with_suffix(".png")))


def measure(vocab: int, k: int, direction: Direction) -> list[dict[str, Any]]:
    """For each tail mode: bias of value and gradient, and the gradient's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(vocab, dtype=torch.float64, generator=generator) * 3
    noise = torch.randn(vocab, dtype=torch.float64, generator=generator)
    teacher = student + 0.8 * noise
    head = (student if direction == "reverse" else teacher).topk(k).indices
    p, of_head_mass = head_mass(student, head)
    true_value, true_gradient = exact_kl_and_gradient(student, teacher, direction)
    size = true_gradient.norm()
    rows = []
    for tail in TAILS:
        if tail == "bucket+teacher_samples" and direction == "reverse":
            continue  # there is no such estimator
        weights = p
        if tail in ("bucket+draws", "bucket+teacher_samples"):
            drawer = student if tail == "bucket+draws" else teacher
            weights = drawer.index_fill(0, head, -torch.inf).softmax(0)
        values, gradients = estimate_by_token(student, teacher, head, direction, tail)
        mean = weights @ gradients
        bias = mean - true_gradient
        spread = (weights @ (gradients - mean).square().sum(1)).sqrt()
        row = {
            "direction": direction,
            "k": k,
            "student_tail_mass": float(1 - p[head].sum()),
            "tail": tail,
            "value_bias": float((weights @ values - true_value).abs() / true_value),
            "gradient_bias": float(bias.norm() / size),
            "gradient_sd": float(spread / size),
        }
        if tail == "published":
            sign = 1 if direction == "reverse" else -1
            row["bias_from_head_mass_gradient"] = float((bias - sign * of_head_mass).norm() / size)
        rows.append(row)
    return rows


def head_mass(student: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(student) [V], and the gradient [V] of its mass in the head."""
    leaf = student.clone().requires_grad_()
    p = leaf.softmax(0)
    (gradient,) = torch.autograd.grad(p[head].sum(), leaf)
    return p.detach(), gradient


def exact_kl_and_gradient(
    student: Tensor, teacher: Tensor, direction: Direction
) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    value = exact_kl(leaf[None], teacher[None], direction=direction).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def estimate_by_token(
    student: Tensor, teacher: Tensor, head: Tensor, direction: Direction, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Values [V] and gradients [V, V] in the logits: row y is the estimate when y was sampled.

    By the student; for "bucket+draws" from its tail; for "bucket+teacher_samples" by the teacher
    from its tail.
    """
    vocab = len(student)
    leaf = student.repeat(vocab, 1).requires_grad_()
    tokens = torch.arange(vocab)
    heads = head.expand(vocab, -1)
    rows, teacher_rows = (
        rows_from_logits(logits, heads, tokens, sample_ids=tokens[:, None])
        for logits in (leaf, teacher.expand(vocab, -1))
    )
    inside = torch.isin(tokens, head)
    values = topk_kl(rows, teacher_rows, inside, direction=direction, tail=tail)
    (gradients,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradients


def format_page(result: dict[str, Any]) -> str:
    """docs/estimators.md."""
    rows = result["rows"]
    name = "bias_from_head_mass_gradient"
    return PAGE.format(
        vocabulary=result["vocabulary"],
        published=_format_sd_ratios(rows, "bucket+sampled", "published"),
        sampled=_format_sd_ratios(rows, "sampled", "bucket+sampled"),
        draws=_format_sd_ratios(rows, "bucket+draws", "bucket+sampled"),
        teacher_samples=_format_sd_ratios(rows, "bucket+teacher_samples", "bucket+sampled"),
        head_mass_distance=max(row[name] for row in rows if name in row),
        table=format_table(COLUMNS, map(_format_cells, rows)),
    )


def _format_sd_ratios(rows: Sequence[dict[str, Any]], tail: Tail, baseline: Tail) -> str:
    """Return the range of the gradient sd of a tail mode over that of another."""
    sds = {(row["direction"], row["k"], row["tail"]): row["gradient_sd"] for row in rows}
    ratios = [sds[key] / sds[*key[:2], baseline] for key in sds if key[2] == tail]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _format_cells(row: dict[str, Any]) -> list[str]:
    figures = [row[name] for name in ("value_bias", "gradient_bias", "gradient_sd")]
    return [
        row["direction"],
        str(row["k"]),
        f"{row['student_tail_mass']:.2f}",
        f"`{row['tail']}`",
        *("0" if figure < 1e-12 else f"{figure:.2f}" for figure in figures),
    ]


if __name__ == "__main__":
    main()
