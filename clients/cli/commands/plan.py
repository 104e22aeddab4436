"""`distill plan` and `distill pair`: the needs of a job, computed before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.settings import JobFileArgument, SetOption, settings_of
from protos.errors import ExitCode, InvalidInput

if TYPE_CHECKING:
    from clients.config.kinds import AnyTraining
    from clients.preflight.memory_plan import MemoryPlan
    from clients.preflight.pair import PairReport

PART_COLUMN = "GiB per GPU"  # title of the first column
DirectoryArgument = Annotated[Path, typer.Argument(exists=True, file_okay=False)]


def plan(
    context: typer.Context,
    job: JobFileArgument,
    sets: SetOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of GPUs that train; default: train.processes."),
    ] = None,
    memory: Annotated[
        float, typer.Option(min=1, max=10_000, metavar="GIB", help="Memory of a GPU in GiB.")
    ] = 80.0,
) -> ExitCode:
    """Compute the GPU memory of a job before anything is loaded.

    It prints what a GPU needs in each stage of a step, the largest micro-batch that fits, and, if
    the job does not fit, which change makes it fit. Exit code 1: it does not fit.
    """
    from clients.config.file import load_job
    from clients.config.kinds import gpus_of
    from clients.config.offline import OfflineJob
    from clients.config.tables.common import TrainingJob
    from clients.preflight.context_parallel import check_context_parallel
    from clients.preflight.files import check_processes
    from clients.preflight.memory_plan import plan_of, shape_of_student
    from clients.preflight.tensor_parallel import check_tensor_parallel

    plan_overrides = [*(sets or []), *([f"train.processes={gpus}"] if gpus else [])]
    config = load_job(job, plan_overrides).config
    if not isinstance(config, TrainingJob):
        raise InvalidInput(
            f"a job of method {config.method.type} trains no student",
            field="method.type",
            hint="plan a training job",
        )
    check_processes(config)
    check_tensor_parallel(config)
    check_context_parallel(config)
    output = settings_of(context).output
    memory_plan = plan_of(config, shape_of_student(config), memory)
    if isinstance(config, OfflineJob) and memory_plan.longest is None:
        output.say(
            f"the store {config.data.path} cannot be read: its sequences count as long as a"
            " micro-batch"
        )
    if output.as_json:
        trainer_gpus = config.train.processes
        gpu_shares = {"train": trainer_gpus, "rollouts": gpus_of(config) - trainer_gpus}
        output.result({**_plan_record(memory_plan), "gpus": gpu_shares}, "")
    else:
        print(_format_summary(memory_plan) + _format_engines(config))
        output.table("parts", _part_rows(memory_plan), (PART_COLUMN, *memory_plan.parts))
        print("\n".join(_conclusion_lines(memory_plan, memory)))
    return ExitCode.OK if memory_plan.fits else ExitCode.JOB_FAILED


def _plan_record(plan: MemoryPlan) -> dict[str, object]:
    from clients.preflight.memory import host_bytes

    return {
        "fits": plan.fits,
        "bytes": plan.parts,
        "peak": plan.peak,
        "host": host_bytes(plan.load),
        "usable": plan.usable,
        "largest_micro_batch": plan.micro_batch,
        "changes": plan.changes,
    }


def _format_summary(plan: MemoryPlan) -> str:
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


def _format_engines(config: AnyTraining) -> str:
    """Return a sentence on how trainer and engines divide the GPUs; "" without engine GPUs."""
    from clients.config.kinds import gpus_of

    sampling = gpus_of(config) - config.train.processes
    if not sampling:
        return ""
    rollouts = config.rollouts  # type: ignore[union-attr]  # only a job with this table has some
    return (
        f"Of {gpus_of(config)} GPUs, {config.train.processes} train (the table) and {sampling}"
        f" sample: {rollouts.engine} engines of {rollouts.tensor_parallel_size} each.\n"
    )


def _format_count(weights: int) -> str:
    return f"{weights / 1e9:.3g} billion" if weights >= 1e8 else f"{weights:,}"


def _part_rows(plan: MemoryPlan) -> list[dict[str, str]]:
    from clients.preflight.memory_plan import gib

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


def _conclusion_lines(plan: MemoryPlan, memory: float) -> list[str]:
    from clients.preflight.memory import host_bytes
    from clients.preflight.memory_plan import USABLE, gib

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


def pair(
    context: typer.Context,
    teacher: DirectoryArgument,
    student: DirectoryArgument,
    data: Annotated[
        str, typer.Option(metavar="FILE", help="A .jsonl or .parquet file, or a hub data set.")
    ],
    column: Annotated[
        list[str] | None, typer.Option(help="Read only this column. Repeatable.")
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="Number of records to read.")] = 200,
) -> ExitCode:
    """Compare the tokenizers of two directories, on the texts of a data set.

    It prints whether the student has the teacher's tokenizer, and if not, what share of its tokens
    is one token of the teacher, by kind of text; what a job would minimise, and what to write into
    the job file. Exit code 1: the pair cannot be trained.
    """
    from clients.preflight.pair import pair_report, texts_in

    report = pair_report(teacher, student, texts_in(data, column or [], records))
    output = settings_of(context).output
    if output.as_json:
        output.result(asdict(report), "")
    else:
        _print_pair(report)
        if report.shares:
            rows = [
                {
                    "text": kind,
                    "records": shares.texts,
                    "tokens": shares.tokens,
                    "one to one": f"{shares.one_to_one:.1%}",
                    "left out": f"{shares.left_out:.1%}",
                }
                for kind, shares in report.shares.items()
            ]
            output.table("shares", rows, tuple(rows[0]))
        print("\n".join(_pair_conclusion_lines(report)))
    return ExitCode.JOB_FAILED if report.refusals else ExitCode.OK


def _print_pair(report: PairReport) -> None:
    if report.same is not None:
        print(f"tokenizer: {'the same' if report.same else 'another one'}")
    if report.difference:
        print(f"{report.difference}\n")
    for student_token, teacher_token in report.roles:
        print(f"role: {student_token} of the student is {teacher_token} of the teacher")
    if report.missing:
        print(f"without a role in the other tokenizer: {', '.join(report.missing)}")


def _pair_conclusion_lines(report: PairReport) -> list[str]:
    if report.refusals:
        return [f"The pair cannot be trained: {reason}" for reason in report.refusals]
    lines = [f"\nloss: {report.loss}"]
    job_file_lines = "".join(f"\n  {line}" for line in report.lines)
    return [*lines, f"job file:{job_file_lines}" if job_file_lines else "job file: nothing to set"]
