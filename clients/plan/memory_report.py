"""Formats the output of `distill plan`."""

from __future__ import annotations

from dataclasses import asdict, replace

from clients.config.tables.job import TrainingJob
from clients.plan.memory import host_bytes
from clients.plan.memory_plan import USABLE, MemoryPlan, gib
from clients.plan.step_time import Split, StepTime

PART_COLUMN = "GiB per GPU"  # title of the first column


def plan_record(plan: MemoryPlan) -> dict[str, object]:
    """Return the memory plan as a record for the option `--json`, with sizes in bytes."""
    return {
        "fits": plan.fits,
        "bytes": plan.parts,
        "peak": plan.peak,
        "host": host_bytes(plan.load),
        "usable": plan.usable,
        "largest_micro_batch": plan.micro_batch,
        "changes": plan.changes,
    }


def format_summary(plan: MemoryPlan) -> str:
    """Return one line about the weights, the GPUs, and the micro-batches of the job."""
    load = plan.load
    trained = replace(load, tensor_parallel=1).trained
    sharding = "" if load.processes == 1 else ", FSDP2" if load.sharded else ", DDP"
    if load.tensor_parallel > 1:
        sharding += f" with tensor parallelism in groups of {load.tensor_parallel}"
    if load.context_parallel > 1:
        sharding += f" with context parallelism in groups of {load.context_parallel}"
    sampled = f", {load.sampled} answers sampled at a time" if load.sampled else ""
    return (
        f"{_format_count(load.shape.weights)} weights, {_format_count(trained)} trained, on"
        f" {load.processes} GPU{'s' * (load.processes > 1)}{sharding}; micro-batches of"
        f" {load.tokens} tokens in sequences of {load.line}{sampled}\n"
    )


def format_engines(config: TrainingJob) -> str:
    """Return a sentence about the GPUs of the trainer and of the rollout engines.

    Returns "" if the engines have no GPUs of their own.
    """
    rollouts = config.rollout_engine
    if rollouts is None or not rollouts.gpus:
        return ""
    return (
        f"Of {config.gpus} GPUs, {config.processes} train (the table) and {rollouts.gpus}"
        f" sample: {rollouts.engine} engines of {rollouts.tensor_parallel_size} each.\n"
    )


def _format_count(weights: int) -> str:
    return f"{weights / 1e9:.3g} billion" if weights >= 1e8 else f"{weights:,}"


def part_rows(plan: MemoryPlan) -> list[dict[str, str]]:
    """Return the rows of the table: one per part, and a total. A row has the GiB of each stage."""
    stages = plan.parts.items()
    names = dict.fromkeys(name for parts in plan.parts.values() for name in parts)
    totals = {stage: gib(sum(parts.values())) for stage, parts in stages}
    return [
        {PART_COLUMN: name}
        | {
            stage: gib(stage_parts[name]) if stage_parts.get(name) else ""
            for stage, stage_parts in stages
        }
        for name in names
        if any(parts.get(name) for _, parts in stages)
    ] + [{PART_COLUMN: "total"} | totals]


def conclusion_lines(plan: MemoryPlan, memory: float) -> list[str]:
    """Return lines that say whether the job fits, and which changes make it fit.

    `memory`: GiB per GPU.
    """
    verdict = "fits" if plan.fits else "does not fit"
    lines = [
        f"\nThe job {verdict}: {gib(plan.peak)} GiB of {gib(plan.usable)} GiB"
        f" ({USABLE:.0%} of {memory:g} GiB)."
    ]
    if host := host_bytes(plan.load):
        lines.append(
            f"Host memory: {gib(host)} GiB per GPU for weights, gradients, optimizer and anchor."
        )
    if plan.micro_batch:
        lines.append(f"Largest micro-batch that fits: {plan.micro_batch} tokens.")
    else:
        lines.append(f"Not even one sequence of {plan.load.line} tokens fits.")
    return lines + [f"- {sentence}" for sentence in plan.changes]


def step_record(time: StepTime, split: tuple[Split, StepTime] | None) -> dict[str, object]:
    """Return the time of a step as a record for the option `--json`, in seconds.

    The value of `best_split` is None if there are no GPUs to divide.
    """
    best = None if split is None else {**asdict(split[0]), "seconds": split[1].seconds}
    return {
        "seconds": time.seconds,
        "parts": dict(time.parts),
        "bottleneck": time.bottleneck,
        "without_teacher": time.without_teacher,
        "best_split": best,
    }


def step_lines(machine: str, time: StepTime, split: tuple[Split, StepTime] | None) -> list[str]:
    """Return lines with the predicted seconds of a step, its bottleneck, and the best GPU split."""
    parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in time.parts.items())
    lines = [
        f"\nPredicted for {machine}, if every answer has the maximum length: {time.seconds:.3g} s"
        f" per step; the bottleneck is: {time.bottleneck} ({parts})."
    ]
    if time.without_teacher:
        lines.append("The teacher is not counted, because the size of its model is not known here.")
    if split is not None:
        shares, best_time = split
        counts = {"training": shares.trainer, "engines": shares.engines, "teacher": shares.teacher}
        division = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines.append(f"Best split of the GPUs: {division}: {best_time.seconds:.3g} s per step.")
    return lines
