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

Training takes {steps} steps of {result["prompts"]} answers with {result["tokens"]} tokens. The
table compares the final exact KL(student||teacher) on held-out prompts, in nats per token. [Tail
draws](draws.md) has all losses and the toy pair.

{effects_table([*effects, *near_exact], "nats")}

Draws do not change the time of a step: the loss took {loss:.2f} times and a decoding step
{decoding:.2f} times as long as without draws ([Tail draws](draws.md)). The next table compares
draws after half the steps with the other modes after all steps:

{effects_table(sooner, "nats")}

This benchmark has no downstream accuracy: the student solves no question of GSM8K before or after
training, because answers of {result["tokens"]} tokens end before the result.

![Held-out KL of each loss](draws-training-real.png)
"""
    command = "python -m benchmarks.draws.training --data train.jsonl --pair real"
    claim = (
        "At 64 ids per row, draws train better than every other tail mode, and nearly as well as"
        " all logits"
    )
    return Section(claim, [*effects, *near_exact], text, command, "3 minutes per run")


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

This section gives the bias and the standard deviation (sd) of one token's gradient in the student's
logits, divided by the norm of the exact gradient. The values are computed in closed form over all
49,152 ids, without sampling error, at every eighth token of {groups[0]["positions"] // 8} sampled
answers. Draws and teacher samples have M = {draws}. The sd of a mean over tokens falls with the
number of tokens; the bias does not. `bucket+sampled`, `sampled`, draws and teacher samples have
bias 0 at every k.

![Bias and standard deviation by k](evidence-gradients.png)

{effects_table(effects, "bias over the gradient")}

**Necessary k.** The table has two values for each mode: the smallest measured k with an error of
at most a quarter of the gradient, and the smallest with at most a tenth. For modes without samples,
the error is the bias. For modes with 8 draws or 8 teacher samples, it is the standard deviation:

{format_needed_k(groups)}

- With draws, a larger k helps little: at equal bytes, more draws lower the sd more than more head
  ids ([Tail draws](draws.md)).
- Tokens with high entropy need a larger k. For a bias of a quarter (reverse), `renormalised` needs
  k = {low} at the third of tokens with the lowest entropy, and k = {high} at the third with the
  highest entropy.
- The position in the answer (tokens 1 to 16, 33 to 64) has a smaller effect than entropy.
- Forward KL with a token sampled by the student does not work here: its sd is tens to thousands of
  times the gradient, because the student gives the teacher's likely tokens almost no mass.
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
    return Section(claim, [*effects, *exact], text, command, "2 to 4 minutes per run")


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

A toy pair with 4,096 ids learns GSM8K ([Offline training: measurements](offline.md)). The gap is
the student's KL before training minus its KL after training with the exact loss. The effect is the
fraction of this gap that a method closes.

{effects_table(effects, "share")}
"""
    claim = (
        "Offline rows of 55 bytes per token close nearly all of the gap to training on all logits"
    )
    return Section(claim, effects, text, "make bench-offline DATA=train.jsonl", "15 minutes")
