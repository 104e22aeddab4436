"""Writes docs/draws.md and its pictures from the results of `noise` and `training`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.draws.picture import draw_final_kl, draw_noise
from benchmarks.shared.pages import format_table, write_page

TRAINING = Path("benchmarks/results/draw_training.json")
SPEED = Path("benchmarks/results/draw_speed.json")
TAILS = ("none", "bucket", "published", "sampled", "bucket+sampled")

PAGE = """\
# Tail draws: noise at equal bytes

This page compares the tail modes of `topk_kl` at equal numbers of ids per row and bytes per token.
The models are a real pair: SmolLM2-135M-Instruct teaches a student with 22 of its 30 layers, on
answers to questions of GSM8K, with a vocabulary of {vocabulary:,} ids.

## Noise of one token's gradient

`python -m benchmarks.draws.noise --data train.jsonl --student runs/draws/real-trained` computes
these values at {positions} positions of answers sampled by the trained student. *sd* is the
standard deviation of the gradient in the logits. *bias* is the distance between the mean gradient
and the exact gradient. Both values are root mean squares over the positions, divided by the root
mean square of the exact gradient, and use sums over the whole vocabulary. The sd of a mean over n
tokens falls with the square root of n; the bias does not.

![Bias and standard deviation against bytes a token](draws.png)

{noise}

A row has k head ids and M draws. The table has the four best splits for each number of ids, for
reverse KL with `bucket+draws`:

{splits}

The next table has the sd for reverse KL with `bucket+draws`: first for independent draws, then in
brackets for stratified draws, which the sampler makes from one random number per row. At one
position, the sd of independent draws is `(P_t / sqrt(M)) sd of [gap(z) (e_z - p)]`. Here z is an
id drawn from the student's tail, and e_z its unit vector. The probabilities are p (student) and q
(teacher), their sums over the tail P_t and Q_t, and gap(z) is log(p(z)/P_t) - log(q(z)/Q_t). The
column "the sampled token" has the sd of `bucket+sampled`. Stratified draws usually have a lower
sd, but not always (k = 64, M = 64):

{independent}

The same tables for a toy model with 1,000 ids and random logits, whose head has less mass:

{toy}
{cost}{training}
## Where it matters

- **The tail matters most for the real pair.** 16% of the mass is outside its 64 head ids. The
  biased modes `none` and `bucket` end farthest from the exact loss. `published` has a smaller
  bias, but a high variance.
- **16 ids per row are enough for the real pair.** With `bucket+draws`, all splits from 8 + 8 on end
  within 0.05 nats of the exact loss, and the differences between splits are no larger than the
  differences between seeds. 8 + 8 ids match 512 head ids with the sampled token, with a thirtieth
  of the bytes.
- **The remaining variance matters for the toy pair.** With larger steps (learning rate 0.005), the
  variance costs 0.13 to 0.25 nats, and draws help more than head ids: compare 16 + 48 and 32 + 16.
- **All runs need the same time per step**: the number of ids changes neither the time of the loss
  nor the time of sampling; see Cost.

The runs of the real pair used two machines. Different rounding changes some sampled tokens, so
the KL of the same student at step 0 is 4.095 on one machine and 4.123 on the other.
"""

COST = """
## Cost

`python -m benchmarks.draws.speed --repetitions 21` measures these times with 151,936 ids on
{threads} CPU threads. The two variants alternate. The ratio is the median over neighbouring
measurements, with the lowest and the highest ratio in brackets.

{table}
"""

TRAINED = """
## Training: the {name} pair

`python -m benchmarks.draws.training --data train.jsonl {options}` runs {steps} on-policy steps of
{prompts} answers with at most {tokens} tokens, with learning rate {learning_rate} and {seeds}
seeds. The KL is the exact KL(student||teacher) per token, over the student's answers to {held_out}
held-out questions, in nats. At step 0, the KL is {before:.3f}.

In the table, *ids* is the number of token ids in a row, and *bytes* is the size of a row. The
column *to exact* is the held-out KL after the last step with the loss of the line, minus the KL
with the exact loss and the same seed: the mean over the seeds, and its standard error.{missing}

![Held-out KL of each loss](draws-training-{name}.png)

{table}
"""


def write_draws_page(noise: dict[str, Any], page: Path) -> str:
    """Write the page and its pictures, and return a message."""
    training = json.loads(TRAINING.read_text()) if TRAINING.exists() else {}
    text = PAGE.format(
        vocabulary=noise["vocabulary"],
        positions=noise["positions"],
        noise=_format_noise(noise["pair"]),
        splits=_format_splits(noise["pair"]),
        independent=_format_independent_draws(noise["pair"]),
        toy=_format_noise(noise["toy"]),
        cost=_format_cost(json.loads(SPEED.read_text())) if SPEED.exists() else "",
        training="\n".join(_format_training(name, result) for name, result in training.items()),
    )
    messages = [write_page(page, text), draw_noise(noise["pair"], page.with_suffix(".png"))]
    for name, result in training.items():
        messages.append(draw_final_kl(result, page.with_name(f"draws-training-{name}.png")))
    return "\n".join(messages)


def _format_noise(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of bias and sd by tail mode and number of ids, for each direction."""
    parts = []
    for direction, drawn_tail in (
        ("reverse", "bucket+draws"),
        ("forward", "bucket+teacher_samples"),
    ):
        header = ["ids a row", "tail mass", *(f"`{tail}`" for tail in (*TAILS, drawn_tail))]
        direction_rows = [
            row for row in rows if row["direction"] == direction and row["stratified"]
        ]
        table_rows = []
        for budget in sorted({row["k"] for row in direction_rows if row["tail"] == "none"}):
            by_tail = {
                row["tail"]: row
                for row in direction_rows
                if row["k"] == budget and not row["draws"]
            }
            best = min(
                _select_splits(direction_rows, drawn_tail, budget, least_draws=1),
                key=lambda row: float(row["sd"]),
            )
            mass = next(row["tail_mass"] for row in rows if row["k"] == budget and row["tail_mass"])
            table_rows.append(
                [
                    str(budget),
                    f"{mass:.3f}",
                    *(f"{by_tail[tail]['bias']:.2f} / {by_tail[tail]['sd']:.2f}" for tail in TAILS),
                    f"0 / **{best['sd']:.3f}** ({best['k']} + {best['draws']})",
                ]
            )
        table = format_table(header, table_rows)
        parts.append(f"{direction.capitalize()} KL, bias / sd:\n\n{table}")
    return "\n\n".join(parts)


def _select_splits(
    rows: Sequence[dict[str, Any]], tail: str, budget: int, least_draws: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of stratified draws whose k and M make `budget` ids together."""
    return [
        row
        for row in rows
        if row["tail"] == tail
        and row["stratified"]
        and row["k"] + row["draws"] == budget
        and row["draws"] >= least_draws
    ]


def _format_splits(rows: Sequence[dict[str, Any]]) -> str:
    table_rows = []
    for budget in sorted({row["k"] for row in rows if row["tail"] == "none"}):
        splits = sorted(
            _select_splits(rows, "bucket+draws", budget), key=lambda row: float(row["sd"])
        )
        best_splits = ", ".join(
            f"{row['k']} + {row['draws']}: {row['sd']:.3f}" for row in splits[:4]
        )
        table_rows.append([str(budget), f"{splits[0]['bytes']:.0f}", best_splits])
    return format_table(["ids a row", "bytes a token", "k + M: sd"], table_rows)


def _format_independent_draws(rows: Sequence[dict[str, Any]]) -> str:
    draw_counts = (1, 4, 16, 64)
    reverse_rows = [row for row in rows if row["direction"] == "reverse"]
    deviations = {
        (row["k"], row["draws"], row["stratified"]): row["sd"]
        for row in reverse_rows
        if row["tail"] == "bucket+draws"
    }
    table_rows = []
    for k in (8, 64, 512):
        sampled_row = next(
            row for row in reverse_rows if row["tail"] == "bucket+sampled" and row["k"] == k
        )
        cells = [
            f"{deviations[k, m, False]:.2f} ({deviations[k, m, True]:.3f})" for m in draw_counts
        ]
        mass = sampled_row["tail_mass"]
        table_rows.append([str(k), f"{mass:.3f}", f"{sampled_row['sd']:.2f}", *cells])
    header = ["k", "tail mass", "the sampled token", *(f"M = {m}" for m in draw_counts)]
    return format_table(header, table_rows)


def _format_cost(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{timing['seconds']:.2f}",
            f"{timing['ratio']:.2f} ({timing['lowest']:.2f} to {timing['highest']:.2f})",
        ]
        for name, timing in result.items()
        if isinstance(timing, dict)
    ]
    table = format_table(["what", "seconds", "ratio"], rows)
    return COST.format(threads=result["threads"], table=table)


def _format_training(name: str, result: dict[str, Any]) -> str:
    """Return the section of a pair of models: the held-out KL of each loss."""
    last_step, middle_step = str(result["steps"]), str(result["steps"] // 2)
    runs = {(run["way"], run["seed"]): run for run in result["runs"]}
    final_kls: dict[str, list[float]] = {}
    for run in result["runs"]:
        final_kls.setdefault(run["way"], []).append(run["kl"][last_step])
    losses = sorted(final_kls, key=lambda loss: statistics.mean(final_kls[loss]))
    seeds = sorted({run["seed"] for run in result["runs"]})
    rows = []
    for loss in losses:
        loss_runs = [runs[loss, seed] for seed in seeds if (loss, seed) in runs]
        finals, halves = (
            [run["kl"][step] for run in loss_runs] for step in (last_step, middle_step)
        )
        differences = [
            run["kl"][last_step] - runs["exact", run["seed"]]["kl"][last_step]
            for run in loss_runs
            if ("exact", run["seed"]) in runs
        ]
        rows.append(
            [
                loss,
                str(loss_runs[0]["ids"]),
                str(loss_runs[0]["bytes"]),
                f"{statistics.mean(halves):.3f}",
                f"{statistics.mean(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})",
                "" if loss == "exact" else _format_mean_and_error(differences),
            ]
        )
    header = ["loss", "ids", "bytes", f"KL, step {middle_step}", f"KL, step {last_step}"]
    return TRAINED.format(
        **{key: result[key] for key in ("steps", "prompts", "tokens", "held_out")},
        learning_rate=result["learning_rate"],
        name=name,
        seeds=len(seeds),
        before=statistics.mean(run["kl"]["0"] for run in result["runs"]),
        options=f"--pair {name} --seeds {len(seeds)}",
        missing=_describe_missing_runs(len(losses) * len(seeds) - len(runs)),
        table=format_table([*header, "to exact"], rows),
    )


def _describe_missing_runs(count: int) -> str:
    return f" {count} runs of this table are not made yet." if count else ""


def _format_mean_and_error(differences: Sequence[float]) -> str:
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} +- {statistics.stdev(differences) / len(differences) ** 0.5:.3f}"
