"""The sections of docs/evidence.md about whole methods, speed and the cost of the service."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import pictures
from benchmarks.evidence.anchors import ARMS, TASKS
from benchmarks.evidence.claims import (
    Effect,
    Section,
    effects_table,
    load_result,
    paired_differences,
)
from benchmarks.shared.pages import format_table


def compare_anchors(docs: Path) -> Section | None:
    result = load_result("evidence_anchors")
    if not result:
        return None
    runs = result["runs"]
    pictures.draw_anchors(runs, docs / "evidence-anchors.png")
    effects = []
    for task in TASKS:
        for rate in sorted({run["rate"] for run in runs if run["task"] == task}):
            case_runs = [run for run in runs if (run["task"], run["rate"]) == (task, rate)]
            for beta in (0.1, 1):
                ema, fixed = ({"arm": f"{kind} anchor, beta {beta:g}"} for kind in ("EMA", "fixed"))
                case = f"{task}, rate {rate:g}, beta {beta:g}"
                none = {"arm": ARMS[0].name}
                effects += [
                    Effect(
                        f"{case}: EMA above fixed",
                        paired_differences(case_runs, "pass@1", ema, fixed),
                    ),
                    Effect(
                        f"{case}: EMA above no KL",
                        paired_differences(case_runs, "pass@1", ema, none),
                    ),
                ]
    effects = [effect for effect in effects if len(effect.differences) > 1]
    text = f"""\
## Anchors in reinforcement learning

A small model learns sums below 100 from rewards; at the start, it solves about 40% of the sums.
Training takes {result["steps"]} steps of 64 sums x 8 answers, two and a half times as long as in
[the first comparison](rl.md), which found no difference at a low learning rate. pass@1 and pass@8
are the probabilities of a correct answer among 1 and 8 answers, estimated from 16 answers at
temperature 1 to 200 unseen sums. Differences of pass@1:

![pass@1 and pass@8 by anchor](evidence-anchors.png)

{effects_table(effects, "pass@1")}

The table has means over seeds; KL is the final KL to the anchor. Sums below 1,000: the student
starts with 7% correct answers, and no run learned in these steps. Sums of 1 to 3 digits: each
number has 1, 2 or 3 digits with equal probability, and the student starts with 28% correct answers.
No run learned much, but runs with a KL have a higher pass@8 than runs without a KL. With beta 1, a
fixed anchor limits learning more than an EMA anchor, which follows the student.

{format_arms(runs)}
"""
    claim = "In RL, an EMA anchor ends above a fixed anchor and above no anchor (EMA-PG's claim)"
    command = "python -m benchmarks.evidence.anchors"
    return Section(claim, effects, text, command, "1 minute per run")


def format_arms(runs: Sequence[Mapping[str, Any]]) -> str:
    header = ["task", "rate", "anchor", "seeds", "pass@1", "pass@8", "answers of 16 that differ"]
    rows = []
    for task, rate in sorted({(run["task"], run["rate"]) for run in runs}):
        for arm in ARMS:
            arm_runs = [
                r for r in runs if (r["task"], r["rate"], r["arm"]) == (task, rate, arm.name)
            ]
            if not arm_runs:
                continue
            means = [
                statistics.mean(run[name] for run in arm_runs)
                for name in ("pass@1", "pass@8", "answers")
            ]
            kls = [run["kl_anchor"] for run in arm_runs if run.get("kl_anchor") is not None]
            kl = f"{statistics.mean(kls):.3f}" if kls else "-"
            shares = [f"{means[0]:.3f}", f"{means[1]:.3f}", f"{means[2]:.1f}"]
            rows.append([task, f"{rate:g}", arm.name, str(len(arm_runs)), *shares, kl])
    return format_table([*header, "KL"], rows)


def compare_rl_estimators(docs: Path) -> Section:
    finals_by_arm = {
        summary["name"]: summary["finals"] for summary in load_result("rl")["summaries"]
    }
    effects = []
    for beta in (0.001, 0.1):
        default_finals = finals_by_arm[f"EMA anchor, bucket+sampled, beta {beta:g}"]
        for estimator in ("published", "k3"):
            baseline_finals = finals_by_arm[f"EMA anchor, {estimator}, beta {beta:g}"]
            ends = [a - b for a, b in zip(default_finals, baseline_finals, strict=True)]
            effects.append(Effect(f"beta {beta:g}: `bucket+sampled` above `{estimator}`", ends))
    text = f"""\
## The estimator of RL's KL

The table compares the held-out accuracy of the runs in [Reinforcement learning:
measurements](rl.md). The vocabulary has 257 ids, and only 0.3% of the mass is outside a head of 32
ids. Therefore, the choice of the tail has no effect.

{effects_table(effects, "accuracy")}
"""
    claim = "In RL, `bucket+sampled` ends above `published` and k3"
    return Section(claim, effects, text, "python -m benchmarks.rl", "30 minutes")


def compare_training_methods(docs: Path) -> Section | None:
    result = load_result("evidence_methods")
    if not result:
        return None
    runs = [run | {"end": run["curve"][-1]["accuracy"]} for run in result["runs"]]
    pictures.draw_methods(runs, docs / "evidence-methods.png")
    effects = []
    for rate in sorted({run["rate"] for run in runs}):
        for sums in (500, None):
            case_runs = [run for run in runs if (run["rate"], run["sums"]) == (rate, sums)]
            case = f"{sums or '9,000'} sums, rate {rate:g}"
            for baseline in ("sft", "offline"):
                ends = paired_differences(
                    case_runs, "end", {"method": "on-policy"}, {"method": baseline}
                )
                effects.append(Effect(f"{case}: on-policy above {baseline}", ends))
    effects = [effect for effect in effects if len(effect.differences) > 1]
    text = f"""\
## On-policy, offline, fine-tuning, rewards

This section compares four methods with the same student and {result["steps"]} steps of 64
sequences: fine-tuning on the teacher's answers, offline distillation from rows of the same
answers, on-policy distillation, and RL from rewards. The teacher is always correct, and answers
have at most four tokens. The student needs 6 FLOPs per weight and token, and 8 for a sampled token.

![Accuracy by FLOPs](evidence-methods.png)

RL from rewards (8 sums per step, no KL) does not improve this weak student, and lowers its accuracy
at the higher learning rate. [The runs with anchors](#anchors-in-reinforcement-learning) start from
a better student. Lines are medians over seeds; dots are the lowest and highest values. The table
has differences of the final accuracy after equal steps. On-policy distillation needs a third more
FLOPs of the student.

{effects_table(effects, "accuracy")}
"""
    claim = (
        "On-policy distillation ends above fine-tuning and offline distillation on short answers"
    )
    return Section(
        claim, effects, text, "python -m benchmarks.evidence.methods", "1 minute per run"
    )


def compare_speed(docs: Path) -> Section:
    runs = load_result("trl_training")["runs"]
    ratios = [
        trl_run["seconds"] / own_run["seconds"]
        for own_run in runs
        for trl_run in runs
        if (own_run["way"], trl_run["way"]) == ("vllm", "TRL")
        and own_run["seed"] == trl_run["seed"]
    ]
    kls = paired_differences(runs, "kl", {"way": "TRL"}, {"way": "vllm"})
    effects = [
        Effect("times TRL's speed, above 1.3", ratios, least=1.3),
        Effect("TRL's held-out KL minus ours, above -0.02", kls, least=-0.02),
    ]
    text = f"""\
## Speed compared with TRL

This section compares whole runs with TRL's DistillationTrainer, with the same models, batch and
cores ([Results](results.md#comparison-with-trl)). Our runs use a vLLM engine that samples one step
ahead.

{effects_table(effects, "ratio, nats", 2)}
"""
    command = "make bench-trl DATA=train.jsonl"
    claim = "A step is 1.3 times as fast as a step of TRL at equal KL"
    return Section(claim, effects, text, command, "6 minutes per run")


def compare_service(docs: Path) -> Section | None:
    result = load_result("evidence_service_cost")
    if not result:
        return None
    rounds_by_way: dict[str, list[dict[str, Any]]] = {}
    for measurement in result["rounds"]:
        rounds_by_way.setdefault(measurement["way"], []).append(measurement)
    in_process_rounds = rounds_by_way["in the process"]
    rows, effects = [], []
    for way, rounds in rounds_by_way.items():
        speed = statistics.median(
            measurement["tokens"] / measurement["seconds"] for measurement in rounds
        )
        cpu = statistics.median(
            measurement["cpu"] / measurement["tokens"] for measurement in rounds
        )
        rows.append([way, f"{speed:.0f}", f"{1000 * cpu:.2f}"])
        if way != "in the process":
            ratios = [
                a["seconds"] / b["seconds"] for a, b in zip(in_process_rounds, rounds, strict=True)
            ]
            effects.append(
                Effect(f"{way}: above 0.95 of the speed in the process", ratios, least=0.95)
            )
    text = f"""\
## The cost of the service

SmolLM2-135M scores answers of GSM8K with 16 head ids and 48 draws per row. The three variants
alternate, and an effect is the mean over rounds. The in-process teacher scores all sequences in one
batch. The service groups sequences of similar lengths, which is probably why the service is faster.

{format_table(["teacher", "tokens/s (median)", "ms of CPU a token"], rows)}

{effects_table(effects, "times the speed in the process")}

Request and response together need 392 bytes per row, so 40 Mbit/s transfer 12,700 rows per second.
All logits in float16 would need 98,304 bytes per row, or 51 rows per second.
"""
    claim = "A teacher service costs less than 5% of the teacher's speed, also over 40 Mbit/s"
    command = "python -m benchmarks.evidence.service_cost --data train.jsonl"
    return Section(claim, effects, text, command, "10 minutes")
