"""Writes docs/draws.md and its pictures from the results of `noise` and `training`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.draws.picture import draw_curves, draw_noise

TRAINING = Path("benchmarks/results/draw_training.json")
SPEED = Path("benchmarks/results/draw_speed.json")
TAILS = ("none", "bucket", "published", "sampled", "bucket+sampled")

PAGE = """\
# Tail draws: noise at equal bytes

Which ids should a row hold? This page compares every tail mode of `topk_kl` at equal numbers of
ids a row and of bytes a token, on a real pair: SmolLM2-135M-Instruct teaches a student of 22 of
its 30 layers, on answers to questions of GSM8K, with a vocabulary of {vocabulary:,} ids.

## Noise of one token's gradient

Made by `python -m benchmarks.draws.noise --data train.jsonl --student runs/draws/real-trained`, at
{positions} positions of the answers that the trained student samples. *sd* is the standard
deviation of the gradient in the logits, *bias* the distance of its mean from the exact gradient;
both are root mean squares over the positions, divided by that of the exact gradient. The sums are
over the whole vocabulary. A standard deviation averages out with the root of the number of tokens;
a bias does not.

![Bias and standard deviation against bytes a token](draws.png)

{noise}

The four best splits of each number of ids, reverse KL with `bucket+draws`:

{splits}

Independent draws, for comparison with the closed form `sd = (P_t / sqrt(M)) sd of [gap (e_z -
p)]`; in brackets stratified draws, which the sampler makes from
one random number a row. These usually vary less, but not always (k = 64, M = 64):

{independent}

The same for a toy of 1,000 ids with random logits, whose head holds less:

{toy}
{cost}{training}
## Where it matters

- **The tail is most of the loss of the real pair.** Its 64 head ids leave 16% of the mass outside,
  and `none` and `bucket`, which are biased, end farthest from the exact loss. `published` is biased
  less, and noisy.
- **16 ids a row are enough there.** With `bucket+draws` every k and M from 8 + 8 on ends within
  0.05 nats of the exact loss, and they differ from each other by no more than seeds do. 8 + 8 do as
  well as 512 head ids with the sampled token alone, in a thirtieth of the bytes.
- **On the toy pair the noise that is left matters.** Larger steps (learning rate 0.005) turn it
  into 0.13 to 0.25 nats, and draws are worth more than head ids: 16 + 48 against 32 + 16.
- **Equal steps are equal seconds**: the number of ids changes neither the time of the loss nor that
  of sampling; see Cost.

The runs of the real pair were made on two machines. Rounding decides single tokens of sampled
answers, so the KL of the same student at step 0 is 4.095 on one and 4.123 on the other.
"""

COST = """
## Cost

Made by `python -m benchmarks.draws.speed --repetitions 21` with 151,936 ids on {threads} CPU
threads. The two sides alternate; the ratio is the median of the ratios of neighbours, with the
lowest and the highest.

| what | seconds | ratio |
|---|---|---|
{lines}
"""

LEARNED = """
## Training: the {name} pair

Made by `python -m benchmarks.draws.training --data train.jsonl {options}`: {steps} on-policy steps
of {prompts} answers of at most {tokens} tokens, learning rate {learning_rate}, seeds: {seeds}. The
KL is the exact KL(student||teacher) per token, over the student's answers to {held_out} held-out
questions, in nats; at step 0 it is {before:.3f}. *ids* and *bytes* are those of a row. *to exact*
is the mean difference from the exact loss with the same seed, with its standard error over
seeds.{missing}

![Held-out KL of each loss](draws-training-{name}.png)

{table}
"""


def write_page(noise: dict[str, Any], page: Path) -> str:
    """Write the page and its pictures, and return a message."""
    training = json.loads(TRAINING.read_text()) if TRAINING.exists() else {}
    page.write_text(
        PAGE.format(
            vocabulary=noise["vocabulary"],
            positions=noise["positions"],
            noise=_noise(noise["pair"]),
            splits=_splits(noise["pair"]),
            independent=_independent(noise["pair"]),
            toy=_noise(noise["toy"]),
            cost=_cost(json.loads(SPEED.read_text())) if SPEED.exists() else "",
            training="\n".join(_training(*one) for one in training.items()),
        ).rstrip()
        + "\n"
    )
    drawn = draw_noise(noise["pair"], page.with_suffix(".png"))
    for name, result in training.items():
        drawn += "\n" + draw_curves(result, page.with_name(f"draws-training-{name}.png"))
    return f"wrote {page}\n{drawn}"


def _noise(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for direction, sampled in (("reverse", "bucket+draws"), ("forward", "bucket+teacher_samples")):
        lines += [
            f"{direction.capitalize()} KL, bias / sd:",
            "",
            "| ids a row | tail mass | "
            + " | ".join(f"`{tail}`" for tail in (*TAILS, sampled))
            + " |",
            "|---" * (len(TAILS) + 3) + "|",
        ]
        mine = [row for row in rows if row["direction"] == direction and row["stratified"]]
        budgets = sorted({row["k"] for row in mine if row["tail"] == "none"})
        for budget in budgets:
            single = {row["tail"]: row for row in mine if row["k"] == budget and not row["draws"]}
            best = _best(rows, direction, sampled, budget)
            cells = [f"{single[tail]['bias']:.2f} / {single[tail]['sd']:.2f}" for tail in TAILS]
            cells.append(f"0 / **{best['sd']:.3f}** ({best['k']} + {best['draws']})")
            mass = next(row["tail_mass"] for row in rows if row["k"] == budget and row["tail_mass"])
            lines.append(f"| {budget} | {mass:.3f} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _best(rows: Sequence[dict[str, Any]], direction: str, tail: str, budget: int) -> dict[str, Any]:
    mine = [
        row
        for row in rows
        if (row["direction"], row["tail"]) == (direction, tail)
        and row["stratified"]
        and row["k"] + row["draws"] == budget
        and row["draws"]
    ]
    return min(mine, key=lambda row: float(row["sd"]))


def _splits(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| ids a row | bytes a token | k + M: sd |", "|---|---|---|"]
    budgets = sorted({row["k"] for row in rows if row["tail"] == "none"})
    for budget in budgets:
        mine = sorted(
            (
                row
                for row in rows
                if row["tail"] == "bucket+draws"
                and row["stratified"]
                and row["k"] + row["draws"] == budget
            ),
            key=lambda row: float(row["sd"]),
        )
        size = mine[0]["bytes"]
        cells = ", ".join(f"{row['k']} + {row['draws']}: {row['sd']:.3f}" for row in mine[:4])
        lines.append(f"| {budget} | {size:.0f} | {cells} |")
    return "\n".join(lines)


def _independent(rows: Sequence[dict[str, Any]]) -> str:
    counts = (1, 4, 16, 64)
    lines = ["| k | tail mass | the sampled token | " + " | ".join(f"M = {m}" for m in counts)]
    lines[0] += " |"
    lines.append("|---" * (len(counts) + 3) + "|")
    reverse = [row for row in rows if row["direction"] == "reverse"]
    found = {
        (row["k"], row["draws"], row["stratified"]): row["sd"]
        for row in reverse
        if row["tail"] == "bucket+draws"
    }
    for k in (8, 64, 512):
        coin = next(row for row in reverse if row["tail"] == "bucket+sampled" and row["k"] == k)
        cells = [f"{found[k, m, False]:.2f} ({found[k, m, True]:.3f})" for m in counts]
        mass = coin["tail_mass"]
        lines.append(f"| {k} | {mass:.3f} | {coin['sd']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cost(result: dict[str, Any]) -> str:
    lines = [
        f"| {name} | {of['seconds']:.2f} | {of['ratio']:.2f} ({of['lowest']:.2f} to "
        f"{of['highest']:.2f}) |"
        for name, of in result.items()
        if isinstance(of, dict)
    ]
    return COST.format(threads=result["threads"], lines="\n".join(lines))


def _training(name: str, result: dict[str, Any]) -> str:
    last, first = str(result["steps"]), "0"
    ends_of: dict[str, list[float]] = {}
    for run in result["runs"]:
        ends_of.setdefault(run["way"], []).append(run["kl"][last])
    ways = sorted(ends_of, key=lambda way: statistics.mean(ends_of[way]))
    seeds = sorted({run["seed"] for run in result["runs"]})
    by = {(run["way"], run["seed"]): run for run in result["runs"]}
    middle = str(result["steps"] // 2)
    lines = [
        f"| loss | ids | bytes | KL, step {middle} | KL, step {last} | to exact |",
        "|---|---|---|---|---|---|",
    ]
    for way in ways:
        runs = [by[way, seed] for seed in seeds if (way, seed) in by]
        ends, halves = ([run["kl"][step] for run in runs] for step in (last, middle))
        gaps = [
            by[way, seed]["kl"][last] - by["exact", seed]["kl"][last]
            for seed in seeds
            if (way, seed) in by and ("exact", seed) in by
        ]
        gap = "" if way == "exact" else _with_error(gaps)
        ids, size = runs[0]["ids"], runs[0]["bytes"]
        lines.append(
            f"| {way} | {ids} | {size} | {statistics.mean(halves):.3f} "
            f"| {statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f}) | {gap} |"
        )
    before = statistics.mean(run["kl"][first] for run in result["runs"])
    options = f"--pair {name} --seeds {len(seeds)}"
    return LEARNED.format(
        **{name: result[name] for name in ("steps", "prompts", "tokens", "held_out")},
        learning_rate=result["learning_rate"],
        name=name,
        seeds=len(seeds),
        before=before,
        options=options,
        missing=_missing(by, ways, seeds),
        table="\n".join(lines),
    )


def _missing(by: Mapping[tuple[str, int], Any], ways: Sequence[str], seeds: Sequence[int]) -> str:
    missing = len(ways) * len(seeds) - len(by)
    return f" {missing} runs of this table are not made yet." if missing else ""


def _with_error(gaps: Sequence[float]) -> str:
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} +- {statistics.stdev(gaps) / len(gaps) ** 0.5:.3f}"
