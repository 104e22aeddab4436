"""The sections of docs/evidence.md about the tail: noise, and training with each tail mode."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import pictures
from benchmarks.evidence.claims import (
    Effect,
    Interval,
    Section,
    effects_table,
    load_result,
    paired_differences,
)
from benchmarks.shared.pages import format_table


def compare_tail_modes(docs: Path) -> Section:
    result = load_result("draw_training")["real"]
    steps = result["steps"]
    runs = [
        run | {"end": run["kl"][str(steps)], "half": run["kl"][str(steps // 2)]}
        for run in result["runs"]
    ]
    draws_16_48 = {"way": "bucket+draws, k = 16, M = 48"}
    baselines = [f"{tail}, k = 64" for tail in ("bucket+sampled", "published", "bucket", "none")]
    effects = [
        Effect(
            f"`{loss}` ends above `bucket+draws`, 16 + 48",
            paired_differences(runs, "end", {"way": loss}, draws_16_48),
        )
        for loss in baselines
    ]
    near_exact = [
        Effect(
            f"{k} + {m} draws end less than 0.1 above all logits",
            [
                0.1 - difference
                for difference in paired_differences(
                    runs, "end", {"way": f"bucket+draws, k = {k}, M = {m}"}, {"way": "exact"}
                )
            ],
        )
        for k, m in ((16, 48), (8, 16), (8, 8))
    ]
    halved = [run | {"end": run["half"]} if run | draws_16_48 == run else run for run in runs]
    sooner = [
        Effect(
            f"`{loss}` ends above `bucket+draws`, 16 + 48, after half the steps",
            paired_differences(halved, "end", {"way": loss}, draws_16_48),
        )
        for loss in baselines
    ]
    cost = load_result("draw_speed")
    loss, decoding = (
        difference["ratio"] for difference in cost.values() if isinstance(difference, dict)
    )
    text = f"""\
## On-policy: the tail at a real vocabulary

{steps} steps of {result["prompts"]} answers of {result["tokens"]} tokens; the exact held-out
KL(student||teacher) at the end, in nats a token. [Tail draws](draws.md) has all losses and the toy
pair.

{effects_table([*effects, *near_exact], "nats")}

Equal steps are equal seconds here: with draws the loss took {loss:.2f} and a decoding step
{decoding:.2f} times as long as without ([Tail draws](draws.md)). Draws after half the steps of the
others:

{effects_table(sooner, "nats")}

There is no downstream accuracy: the student gets no question of GSM8K right, before or after, since
an answer of {result["tokens"]} tokens ends before its result.

![Held-out KL of each loss](draws-training-real.png)
"""
    command = "python -m benchmarks.draws.training --data train.jsonl --pair real"
    claim = (
        "At 64 ids a row, draws train better than every other tail mode, and nearly as all logits"
    )
    return Section(claim, [*effects, *near_exact], text, command, "3 minutes a run")


def compare_gradients(docs: Path) -> Section | None:
    result = load_result("evidence_gradients")
    if not result:
        return None
    pictures.draw_gradients(result, docs / "evidence-gradients.png")
    groups = [group for group in result["groups"] if group["student"] != "before"]
    effects = []
    for direction in ("reverse", "forward"):
        for k in (8, 64):
            (group,) = select_groups(groups, "all", direction, "published", k)
            effects.append(Interval(f"`published`, {direction}, k = {k}: bias", group["bias"]))
    low, high = (
        first_k(groups, f"{third} third of entropy", "renormalised", 0.25)
        for third in ("lowest", "highest")
    )
    draws = result["draws"]
    text = f"""\
## The gradient at real checkpoints

Every eighth token of {groups[0]["positions"] // 8} sampled answers; closed form over
all 49,152 ids (no sampling error). Bias and standard deviation (sd) of one token's gradient in the
student's logits, over the exact gradient's norm; draws and teacher samples: M = {draws}. A
standard deviation averages out over tokens; a bias does not. `bucket+sampled`, `sampled`, draws and
teacher samples have bias 0 at every k.

![Bias and standard deviation by k](evidence-gradients.png)

{effects_table(effects, "bias over the gradient")}

**Where k stops mattering.** The smallest measured k at which the bias (of the modes without
samples) or the sd (of 8 draws or teacher samples) is at most a quarter, and at most a tenth, of the
gradient:

{format_needed_k(groups)}

- A larger k buys little where draws are sent: at the same bytes, ids drawn from the tail lower the
  sd more than head ids do ([Tail draws](draws.md)).
- Tokens of high entropy decide: for the lowest third of entropy `renormalised` needs k = {low} for
  a bias of a quarter (reverse), for the highest third k = {high}.
- The place in the answer (tokens 1 to 16, 33 to 64) changes the figures by less than entropy does.
- Forward KL with a token that the student sampled is useless here: its sd is tens to thousands of
  times the gradient, because the student gives tokens that the teacher wants almost no mass.
"""
    claim = "The published Top-k gradient is biased at every k; ours is not"
    command = "python -m benchmarks.evidence.gradients --data train.jsonl --trained STUDENT"
    return Section(claim, effects, text, command, "8 minutes")


def select_groups(
    groups: Sequence[dict[str, Any]], group: str, direction: str, tail: str, k: int
) -> list[dict[str, Any]]:
    key = {"group": group, "direction": direction, "tail": tail, "k": k}
    return [candidate for candidate in groups if candidate | key == candidate]


def first_k(
    groups: Sequence[dict[str, Any]],
    group: str,
    tail: str,
    limit: float,
    direction: str = "reverse",
) -> str:
    """Return the smallest k whose bias and sd are at most `limit`, as text."""
    ks = sorted({group["k"] for group in groups})
    for k in ks:
        (selected,) = select_groups(groups, group, direction, tail, k)
        if max(selected["bias"][0], selected["sd"][0]) <= limit:
            return str(k)
    return f"> {ks[-1]}"


def format_needed_k(groups: Sequence[dict[str, Any]]) -> str:
    rows = []
    for direction, sampled in (("reverse", "bucket+draws"), ("forward", "bucket+teacher_samples")):
        for tail in ("none", "renormalised", "bucket", sampled):
            smallest_ks = [first_k(groups, "all", tail, limit, direction) for limit in (0.25, 0.1)]
            rows.append([direction, f"`{tail}`", *smallest_ks])
    return format_table(["direction", "tail", "a quarter", "a tenth"], rows)


def compare_offline_k(docs: Path) -> Section | None:
    result = load_result("evidence_offline_k")
    if not result or len({run["way"] for run in result["runs"]}) < 3:
        return None
    runs = result["runs"]
    pictures.draw_offline(runs, docs / "evidence-offline.png")
    effects = [
        Effect(
            f"`{tail}` ends above `bucket+teacher_samples`, k = {k}",
            paired_differences(
                runs, "kl", {"way": f"{tail}, k = {k}"}, {"way": f"bucket+teacher_samples, k = {k}"}
            ),
        )
        for k in (1, 8, 64)
        for tail in ("bucket", "none", "renormalised")
        if (tail, k) != ("renormalised", 1)
    ]
    exact = [
        Effect(
            f"`bucket+teacher_samples`, k = {k}, ends less than 0.1 above all logits",
            [
                0.1 - difference
                for difference in paired_differences(
                    runs, "kl", {"way": f"bucket+teacher_samples, k = {k}"}, {"way": "exact"}
                )
            ],
        )
        for k in (1, 8, 64)
    ]
    before = statistics.mean(run["kl"] for run in runs if run["way"] == "before")
    text = f"""\
## Offline: the tail at a real vocabulary

{result["steps"]} steps on reference answers of GSM8K, forward KL, M = 8 tail samples; the exact
held-out KL(teacher||student) a token, in nats ({before:.2f} before).

![Held-out KL of each loss](evidence-offline.png)

{effects_table([*effects, *exact], "nats")}
"""
    claim = "Offline, tail samples train better than cutting the tail, and nearly as all logits"
    command = "python -m benchmarks.evidence.offline_k --data train.jsonl"
    return Section(claim, [*effects, *exact], text, command, "2 to 4 minutes a run")


def compare_offline_gap(docs: Path) -> Section:
    learned = load_result("offline")["learned"]
    kls = {method["name"]: method["kl"]["seeds"] for method in learned["ways"]}
    before = learned["before"]["kl"]
    exact = kls["exact KL, all logits"]
    effects = []
    for name in ("bucket+teacher_samples, k = 8, M = 4", "bucket+teacher_samples, k = 0, M = 12"):
        shares = [(before - kl) / (before - top) for kl, top in zip(kls[name], exact, strict=True)]
        effects.append(Effect(f"`{name}`: share of the gap above 0.97", shares, least=0.97))
    text = f"""\
## Offline: the gap to all logits

A toy pair of 4,096 ids on GSM8K ([Offline training: measurements](offline.md)); the share of the
way from the student's first KL to that of the exact loss.

{effects_table(effects, "share")}
"""
    claim = "Offline rows of 55 bytes a token close nearly all of the gap to training on all logits"
    return Section(claim, effects, text, "make bench-offline DATA=train.jsonl", "15 minutes")
