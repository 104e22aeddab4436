"""Bias and spread of every estimator's gradient, by summing over every token: no statistics.

    python -m benchmarks.estimators [--vocabulary 1000] [--out benchmarks/results/estimators.json]

writes the table, and docs/estimators.png if matplotlib is installed. The problem: student logits of
standard deviation 3, a teacher near it, on-policy samples, float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from student_trainer.losses import Direction, Tail, exact_kl, rows_from_logits, topk_kl

SIZES = (1, 8, 32, 128)
TAILS: tuple[Tail, ...] = ("none", "bucket", "published", "sampled", "bucket+sampled")
COLORS = {
    "none": "#9aa0a6",
    "bucket": "#5f6368",
    "published": "#d93025",
    "sampled": "#f9ab00",
    "bucket+sampled": "#1a73e8",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/estimators.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/estimators.png"))
    options = parser.parse_args()
    rows = [
        row
        for direction in ("reverse", "forward")
        for k in SIZES
        for row in measure(options.vocabulary, k, direction)
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"vocabulary": options.vocabulary, "rows": rows}, indent=1))
    print(table(rows))
    draw(rows, options.vocabulary, options.picture)


def measure(vocab: int, k: int, direction: Direction) -> list[dict[str, Any]]:
    """For each tail mode: bias of value and gradient, and the gradient's standard deviation."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(vocab, dtype=torch.float64, generator=generator) * 3
    noise = torch.randn(vocab, dtype=torch.float64, generator=generator)
    teacher = student + 0.8 * noise
    head = (student if direction == "reverse" else teacher).topk(k).indices
    p = student.softmax(0)
    true_value, true_gradient = exact(student, teacher, direction)
    size = true_gradient.norm()
    rows = []
    for tail in TAILS:
        values, gradients = by_token(student, teacher, head, direction, tail)
        mean = p @ gradients
        spread = (p @ (gradients - mean).square().sum(1)).sqrt()
        rows.append(
            {
                "direction": direction,
                "k": k,
                "student_tail_mass": float(1 - p[head].sum()),
                "tail": tail,
                "value_bias": float((p @ values - true_value).abs() / true_value),
                "gradient_bias": float((mean - true_gradient).norm() / size),
                "gradient_sd": float(spread / size),
            }
        )
    return rows


def exact(student: Tensor, teacher: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    leaf = student.clone().requires_grad_()
    value = exact_kl(leaf[None], teacher[None], direction=direction).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def by_token(
    student: Tensor, teacher: Tensor, head: Tensor, direction: Direction, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Values [V] and gradients [V, V] in the logits: row y is the estimate when y was sampled."""
    vocab = len(student)
    leaf = student.repeat(vocab, 1).requires_grad_()
    tokens = torch.arange(vocab)
    heads = head.expand(vocab, -1)
    teacher_rows = rows_from_logits(teacher.expand(vocab, -1), heads, tokens)
    values = topk_kl(
        rows_from_logits(leaf, heads, tokens),
        teacher_rows,
        torch.isin(tokens, head),
        direction=direction,
        tail=tail,
    )
    (gradients,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradients


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| direction | k | tail mass | `tail` | value bias | gradient bias | gradient sd |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [row[name] for name in ("value_bias", "gradient_bias", "gradient_sd")]
        shown = " | ".join("0" if value < 1e-12 else f"{value:.2f}" for value in figures)
        lines.append(
            f"| {row['direction']} | {row['k']} | {row['student_tail_mass']:.2f} "
            f"| `{row['tail']}` | {shown} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], vocabulary: int, path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: install the bench extra")
        return
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for line, direction in enumerate(("reverse", "forward")):
        for column, (name, title) in enumerate(
            (("gradient_bias", "gradient bias"), ("gradient_sd", "gradient standard deviation"))
        ):
            axis = axes[line][column]
            for place, tail in enumerate(TAILS):
                values = [
                    max(row[name], 0)
                    for row in rows
                    if row["tail"] == tail and row["direction"] == direction
                ]
                where = [i + (place - 2) * 0.16 for i in range(len(SIZES))]
                axis.bar(where, values, 0.15, label=tail, color=COLORS[tail])
            axis.set_title(f"{direction} KL: {title} / |grad KL|", fontsize=10)
            axis.set_xticks(range(len(SIZES)), [f"k = {k}" for k in SIZES])
            axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(f"Estimators of the KL by enumeration, V = {vocabulary} (no bar: exactly zero)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
