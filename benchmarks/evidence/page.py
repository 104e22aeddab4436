"""Writes docs/evidence.md and its pictures from benchmarks/results.

python -m benchmarks.evidence.page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.evidence import real_sections as real
from benchmarks.evidence import tail_sections as tails
from benchmarks.evidence import training_sections as training
from benchmarks.evidence.claims import load_result
from benchmarks.shared.pages import format_table, write_page

DRAWS = "`make bench-draws DATA=train.jsonl`"
HEAD = """\
# Evidence

This page lists the project's claims, the measured effects and the verdicts. `python -m
benchmarks.evidence.page` writes the page from [benchmarks/results](../benchmarks/results). All
intervals are 95% confidence intervals. Comparisons of runs use Student's t over the differences of
runs with the same seed; gradients use a bootstrap over answers. The interval decides the verdict:

- **Shown**: every value in the interval agrees with the claim.
- **Refuted**: every value in the interval contradicts the claim.
- **Not shown**: some values in the interval agree with the claim and others contradict it, or there
  is only one seed and therefore no interval.

If a claim has no real effect, about one comparison in twenty is still shown or refuted, by chance.
All runs use two cores without a GPU. The real model (also: the real pair) is SmolLM2-135M-Instruct
as the teacher, and a student of 22 of its 30 layers, with a vocabulary of 49,152 ids.

{claims}

"""
FIGURES = """\
## Figures without a comparison

These figures have no interval, because each was measured once:

| what | result | command |
|---|---|---|
| sums, 0.24 M teaches a damaged 0.11 M | correct answers 24% -> 99.0% to 99.6% | `make demo` |
| the same student without a teacher, from rewards | correct answers 24% -> 98.4% | `make demo-rl` |
| a search engine, unseen people | correct answers 0% -> 100% | `make demo-search` |
{demo_real}
| memory of the loss, 151,936 ids | 81 MiB; logits 3,525 | `python -m benchmarks.loss` |
| sd of a token's gradient, real pair, 64 ids per row | sd 0.38; without draws 3.46 | {draws} |
| held-out KL of each loss, toy pair | [Tail draws](draws.md#training-the-toy-pair) | {draws} |
| bytes of a row, k = 64 | 280; vLLM's JSON: 4,595 | `python -m benchmarks.wire` |

The run of `make demo-real`: loss and KL by step, on-policy.

![Loss and KL by step](demo-real.png)
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    sections = [section for make in SECTIONS if (section := make(options.docs))]
    claims = format_table(
        ["claim", "verdict", "made by", "cost"], [section.cells for section in sections]
    )
    bodies = [section.text for section in sections]
    page = "\n".join(
        [
            HEAD.format(claims=claims),
            *bodies,
            FIGURES.format(demo_real=format_demo_real(), draws=DRAWS),
        ]
    )
    write_page(options.docs / "evidence.md", page)
    print(claims)


def format_demo_real() -> str:
    result = load_result("demo_real")
    kl = {student["name"]: student["kl"] for student in result["students"]}
    return (
        f"| SmolLM2-135M teaches 22 of its layers on GSM8K, {result['seconds'] / 60:.0f} minutes |"
        f" exact KL {kl['student before']:.2f} -> {kl['on-policy']:.2f} on-policy, "
        f"{kl['offline']:.2f} offline | `make demo-real DATA=train.jsonl` |"
    )


SECTIONS = (
    tails.compare_tail_modes,
    tails.compare_gradients,
    tails.compare_offline_k,
    tails.compare_offline_gap,
    training.compare_anchors,
    training.compare_rl_estimators,
    training.compare_training_methods,
    real.compare_own_answers,
    real.compare_teacher_answers,
    training.compare_speed,
    real.compare_memory,
    training.compare_service,
)

if __name__ == "__main__":
    main()
