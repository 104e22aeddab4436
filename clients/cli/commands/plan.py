"""`distill plan` and `distill pair`: checks of a job that load no weights."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from clients.cli.settings import JobFileArgument, SetOption, settings_of
from protos.errors import ExitCode, InvalidInput


class MachineName(StrEnum):
    """The names of the GPUs that `clients/plan/machines.py` describes."""

    A100 = "A100"
    H100 = "H100"
    H200 = "H200"
    B200 = "B200"


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
        float | None,
        typer.Option(
            min=1, max=10_000, metavar="GIB", help="Memory of a GPU in GiB; default: of --machine."
        ),
    ] = None,
    machine: Annotated[
        MachineName, typer.Option(help="GPU whose figures give the seconds of a step.")
    ] = MachineName.H100,
) -> ExitCode:
    """Compute the GPU memory and the seconds of a step, without loading the model.

    The command prints the memory of a GPU in each stage of a step, and the largest micro-batch that
    fits. If the job does not fit, the command prints which change makes the job fit, and exits with
    code 1. The command also prints the predicted seconds of a step, the bottleneck, and the best
    split of the GPUs.
    """
    from clients.config.file import load_job
    from clients.config.tables.job import TrainingJob
    from clients.plan import memory_report
    from clients.plan.machines import MACHINES
    from clients.plan.memory_plan import plan_of, shape_of_student
    from clients.plan.step_time import best_split, step_time
    from clients.preflight.files import check_processes
    from clients.preflight.limits import fit_limits
    from clients.preflight.parallel import check_context_parallel, check_tensor_parallel
    from clients.preflight.records import estimate_records

    plan_overrides = [*(sets or []), *([f"train.processes={gpus}"] if gpus else [])]
    config = load_job(job, plan_overrides).config
    if not isinstance(config, TrainingJob):
        raise InvalidInput(
            f"a job of method {config.method.type} trains no student",
            field="method.type",
            hint="plan a training job",
        )
    config = fit_limits(config).apply(config)
    check_processes(config)
    check_tensor_parallel(config)
    check_context_parallel(config)
    output = settings_of(context).output
    gpu, shape = MACHINES[machine], shape_of_student(config)
    gpu_memory = memory or float(gpu.size)
    memory_plan = plan_of(config, shape, gpu_memory)
    time = step_time(config, shape, memory_plan.load, gpu)
    split = best_split(config, shape, gpu, memory_plan.longest)
    if config.stores and memory_plan.longest is None:
        output.say(
            f"the store {config.stores['data.path']} cannot be read: its sequences count as long as"
            " a micro-batch"
        )
    records = estimate_records(config)
    steps = config.count_steps(records.epoch_records if records else 0)
    if output.as_json:
        gpu_shares = {"train": config.processes, "rollouts": config.engine_gpus}
        record = {**memory_report.plan_record(memory_plan), "gpus": gpu_shares}
        record |= {"data": records and records.facts, "steps": steps or None}
        output.result({**record, "step": memory_report.step_record(time, split)}, "")
    else:
        print(memory_report.format_summary(memory_plan) + memory_report.format_engines(config))
        columns = (memory_report.PART_COLUMN, *memory_plan.parts)
        output.table("parts", memory_report.part_rows(memory_plan), columns)
        print("\n".join(memory_report.conclusion_lines(memory_plan, gpu_memory)))
        print("\n".join(memory_report.step_lines(machine, time, split)))
        if records is not None:
            print(f"Data: {records}.")
        if config.epochs is not None and records is not None:
            epochs = config.describe_epochs(records.epoch_records)
            print(f"Steps: about {steps:,} for {epochs}, before any is left out.")
    return ExitCode.OK if memory_plan.fits else ExitCode.JOB_FAILED


def pair(
    context: typer.Context,
    teacher: DirectoryArgument,
    student: DirectoryArgument,
    data: Annotated[
        str,
        typer.Option(metavar="FILE", help="Files of records, or a hub data set."),
    ],
    column: Annotated[
        list[str] | None, typer.Option(help="Read only this column. Repeatable.")
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="Number of records to read.")] = 200,
) -> ExitCode:
    """Compare the tokenizers of two directories on the texts of a data set.

    The command prints whether both have the same tokenizer. If not, the command prints the share of
    the student's tokens that equal one token of the teacher, by kind of text. The command also
    prints the objective of a job with this pair, and the keys for the job file. Exit code 1: the
    pair cannot be trained.
    """
    from clients.plan import pair as model_pair

    texts = model_pair.texts_in(data, column or [], records)
    report = model_pair.pair_report(teacher, student, texts)
    output = settings_of(context).output
    if output.as_json:
        output.result(asdict(report), "")
    else:
        if lines := model_pair.summary_lines(report):
            print("\n".join(lines))
        if rows := model_pair.share_rows(report):
            output.table("shares", rows, tuple(rows[0]))
        print("\n".join(model_pair.conclusion_lines(report)))
    return ExitCode.JOB_FAILED if report.refusals else ExitCode.OK
