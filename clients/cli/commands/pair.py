"""`distill pair`: what a teacher and a student can do together, before anything is trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.settings import settings_of
from protos.errors import ExitCode

if TYPE_CHECKING:
    from clients.preflight.pair import PairReport

_Directory = Annotated[Path, typer.Argument(exists=True, file_okay=False)]


def pair(
    context: typer.Context,
    teacher: _Directory,
    student: _Directory,
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

    found = pair_report(teacher, student, texts_in(data, column or [], records))
    output = settings_of(context).output
    if output.as_json:
        output.result(asdict(found), "")
    else:
        _print(found)
        if found.shares:
            rows = [
                {
                    "text": kind,
                    "records": of.texts,
                    "tokens": of.tokens,
                    "one to one": f"{of.one_to_one:.1%}",
                    "left out": f"{of.left_out:.1%}",
                }
                for kind, of in found.shares.items()
            ]
            output.table("shares", rows, tuple(rows[0]))
        print("\n".join(_conclusion(found)))
    return ExitCode.JOB_FAILED if found.refusals else ExitCode.OK


def _print(found: PairReport) -> None:
    if found.same is not None:
        print(f"tokenizer: {'the same' if found.same else 'another one'}")
    if found.difference:
        print(f"{found.difference}\n")


def _conclusion(found: PairReport) -> list[str]:
    if found.refusals:
        return [f"The pair cannot be trained: {reason}" for reason in found.refusals]
    lines = [f"\nloss: {found.loss}"]
    named = "".join(f"\n  {line}" for line in found.lines)
    return [*lines, f"job file:{named}" if named else "job file: nothing to set"]
