"""The sections of docs/evidence.md about whole methods on the real pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import pictures
from benchmarks.evidence.claims import (
    Effect,
    Section,
    effects_table,
    load_result,
    paired_differences,
)
from benchmarks.evidence.memory import PROFILE, RUNS
from benchmarks.evidence.real_methods import BEFORE, METHODS, TASKS
from benchmarks.shared.pages import format_table

COMMAND = "python -m benchmarks.evidence.real_methods --data train.jsonl"
COST = "2 core-minutes per run"


def compare_own_answers(docs: Path) -> Section | None:
    """On the student's own answers, at equal teacher tokens and at equal FLOPs of the student."""
    result = load_result("evidence_real_methods")
    if not result:
        return None
    runs, steps = result["runs"], result["steps"]
    pictures.draw_real_methods(runs, docs / "evidence-real-methods.png")
    effects = [
        *compare_methods(runs, "kl_own", "{task}, equal teacher tokens: {other} above on-policy"),
        *compare_methods(
            runs, "kl_own", "{task}, equal student FLOPs: {other} above on-policy", point=0
        ),
    ]
    text = f"""\
## On a real model: the student's own answers

SmolLM2-135M teaches a student with 22 of its 30 layers two tasks: questions of GSM8K, and short
instructions in the chat format. Training takes {steps} steps of 4 answers with at most 24 tokens,
at a learning rate of 0.0001. For fine-tuning and offline distillation, the teacher writes the
answers at temperature 1, and each answer is used once. For on-policy distillation, the student
writes the answers. The table compares KL(student||teacher) on the student's answers to 16 held-out
prompts, over all ids. After equal steps, the teacher has written or scored an equal number of
tokens. At equal FLOPs of the student, on-policy distillation has made {steps * 3 // 4} steps,
because the student also samples. Differences in nats per token:

{effects_table(effects, "nats")}

![Both KL of every run](evidence-real-methods.png)

Means over seeds, in nats per token:

{format_means(runs)}

No run uses rewards. Neither model solves a question of GSM8K in 24 tokens, so every reward would
be 0, and an instruction has no single correct answer.
"""
    claim = "On a real model, on-policy distillation has the lowest KL on the student's answers"
    return Section(claim, effects, text, COMMAND, COST)


def compare_teacher_answers(_: Path) -> Section | None:
    """On answers of the teacher, which fine-tuning and offline distillation learn from."""
    result = load_result("evidence_real_methods")
    if not result:
        return None
    effects = [
        *compare_methods(
            result["runs"], "kl_teacher", "{task}, equal teacher tokens: {other} above on-policy"
        ),
        *compare_methods(
            result["runs"],
            "kl_teacher",
            "{task}, equal teacher tokens: sft above offline",
            better="offline",
            baselines=("sft",),
        ),
    ]
    text = f"""\
## On a real model: the teacher's answers

The table compares KL(teacher||student) of the same runs, on the teacher's answers to the same
prompts:

{effects_table(effects, "nats")}

KL(student||teacher) on the student's answers is high if the student writes tokens that the teacher
finds unlikely. KL(teacher||student) on the teacher's answers is high if the student finds the
teacher's tokens unlikely.
"""
    claim = (
        "On a real model, on-policy distillation also has the lowest KL on the teacher's answers"
    )
    return Section(claim, effects, text, COMMAND, COST)


def compare_methods(
    runs: Sequence[dict[str, Any]],
    value: str,
    comparison: str,
    *,
    better: str = "on-policy",
    baselines: Sequence[str] = ("offline", "sft"),
    point: int = -1,
) -> list[Effect]:
    """Return the final values of `baselines` minus a point of the curve of `better`, by task."""
    effects = []
    for task in TASKS:
        task_runs = [
            run | {"value": run["curve"][point if run["method"] == better else -1][value]}
            for run in runs
            if run["task"] == task and run["method"] != BEFORE
        ]
        for baseline in baselines:
            paired_values = paired_differences(
                task_runs, "value", {"method": baseline}, {"method": better}
            )
            effects.append(Effect(comparison.format(task=task, other=baseline), paired_values))
    return effects


def format_means(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table of both KL and the perplexity of every method."""
    header = [
        *("task", "method", "seeds", "steps", "KL(student\\|\\|teacher), own answers"),
        *("KL(teacher\\|\\|student), the teacher's", "perplexity of the teacher's"),
        "TFLOPs of the student",
    ]
    rows = []
    for task in TASKS:
        for method in (BEFORE, *METHODS):
            curves = [
                run["curve"] for run in runs if (run["task"], run["method"]) == (task, method)
            ]
            for points in zip(*curves, strict=True):
                means = [
                    f"{statistics.mean(run[name] for run in points):.{digits}f}"
                    for name, digits in (("kl_own", 2), ("kl_teacher", 2), ("perplexity", 0))
                ]
                flops = statistics.mean(run.get("flops", 0) for run in points) / 1e12
                counts = [str(len(points)), str(points[0]["step"])]
                rows.append([task, method, *counts, *means, f"{flops:.2f}"])
    return format_table(header, rows)


def compare_memory(_: Path) -> Section | None:
    """Peak memory against TRL's, and its parts."""
    result = load_result("evidence_memory")
    if not result:
        return None
    runs = {run["run"]: run for run in result["runs"]}
    profile = runs.pop(PROFILE)
    trl_run = runs["TRL"]
    header = ["run", "peak, GiB", "of TRL's", "while learning", "CPU seconds", "trainer", "teacher"]
    rows = []
    for name, run in sorted(runs.items(), key=lambda item: list(RUNS).index(item[0])):
        parts = {item["name"]: item["own"] + item["file"] for item in run["processes"]}
        trainer = next(parts[key] for key in parts if key != "teacher_service")
        teacher = parts.get("teacher_service", 0)
        learning = gib(run["stages"]["learning"])
        share = run["peak_bytes"] / trl_run["peak_bytes"]
        cpu_seconds = f"{run['cpu_seconds']:.0f}"
        peaks = [gib(run["peak_bytes"]), f"{share:.2f}", learning]
        rows.append([name, *peaks, cpu_seconds, gib(trainer), gib(teacher)])
    leanest = min(runs.values(), key=lambda run: run["peak_bytes"])
    engine = next(run for run in load_result("trl_memory")["runs"] if run["way"] == "vllm")
    effects = [
        Effect(
            f"{leanest['run']}: below 0.7 of TRL's peak",
            [0.7 - leanest["peak_bytes"] / trl_run["peak_bytes"]],
        )
    ]
    weights, steps = 4 * profile["weights"], result["steps"]
    text = f"""\
## Memory compared with TRL

The table has the peak memory of all processes of a run; shared pages count once. Each row is one
run of {steps} steps, with the settings of the previous section. The last two columns have the
memory of trainer and teacher at the peak. Two settings change memory and time, but not results:
`train.tokens_per_micro_batch = 256`, and recomputed activations (`student.gradient_checkpointing`;
TRL's default).

{format_table(header, rows)}

The trainer's memory (`serial`) has these parts:

- Weights, gradients and AdamW's two moments: {gib(4 * weights)} GiB.
- Saved tensors for the backward pass of {profile["tokens"]} padded tokens in a micro-batch:
  {gib(profile["saved"])} GiB (counted by autograd hooks).
- Python and the libraries: {gib(profile["libraries"])} GiB.
- A chunk of logits and the gradient of the head: the remaining memory.

At the end, the run copies weights and moments ({gib(3 * weights)} GiB) for its checkpoint. With
small micro-batches or recomputation, this copy causes the peak, not learning. TRL's runs write no
checkpoint.

With a vLLM engine, the peak is {gib(engine["peak_bytes"])} GiB (`python -m
benchmarks.evidence.trl_training`), because of a second copy of the student, vLLM's prefix cache of
1 GiB, and two more processes.
"""
    claim = "A run needs at most 0.7 times the memory of TRL"
    command = "python -m benchmarks.evidence.memory --data train.jsonl"
    return Section(claim, effects, text, command, "2 minutes per run")


def gib(count: float) -> str:
    """Return bytes as GiB."""
    return f"{count / 2**30:.2f}"
