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

What is claimed, how large it is, and whether it was shown. Written by `python -m
benchmarks.evidence.page` from [benchmarks/results](../benchmarks/results). Intervals are 95%
(Student's t over seeds, of the differences of runs with the same seed; of the gradients over
answers, bootstrap). *Shown*: the interval lies wholly on the claimed side; *refuted*: wholly on the
other; *not shown*: it contains both. Of twenty comparisons without any effect, one is shown or
refuted by chance. All runs are on two cores without a GPU; the real models are SmolLM2-135M and a
student of 22 of its 30 layers, with 49,152 ids.

{claims}

"""
FIGURES = """\
## Figures without a comparison

Measured once, so that they have no interval:

| what | result | command |
|---|---|---|
| sums, 0.24 M teaches a damaged 0.11 M | right answers 24.8% -> 99.4% | `make demo` |
| the same without a teacher, from rewards | right answers 29% -> 74% | `make demo-rl` |
| a search engine, unseen people | right answers 0% -> 100% | `make demo-search` |
{demo_real}
| memory of the loss, 151,936 ids | 81 MiB; logits 3,525 | `python -m benchmarks.loss` |
| noise of a token's gradient, real pair, 64 ids a row | sd 0.38; without draws 3.46 | {draws} |
| held-out KL of each loss, toy pair | [Tail draws](draws.md#training-the-toy-pair) | {draws} |
| bytes of a row, k = 64 | 280; JSON as vLLM sends 4,595 | `python -m benchmarks.wire` |

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
        f"| SmolLM2-135M teaches its cut on GSM8K, {result['seconds'] / 60:.0f} minutes in all | "
        f"exact KL {kl['student before']:.2f} -> {kl['on-policy']:.2f} on-policy, "
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
