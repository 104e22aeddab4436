"""`distill store`: look into stores of rows, check them, join them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.cli.output import plain
from clients.cli.settings import settings_of
from protos.errors import ExitCode

app = typer.Typer(help="Look into stores of captured rows.", no_args_is_help=True)

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.")]


@app.command()
def info(context: typer.Context, store: StoreArgument) -> None:
    """What is in a store: counts, bytes a row, and what its rows are of."""
    from clients.store.checks import summary_of

    summary = summary_of(store)
    width = max(map(len, summary))
    lines = (f"{key.ljust(width)}  {plain(str(value))}" for key, value in summary.items())
    settings_of(context).output.result(summary, "\n".join(lines))


@app.command()
def verify(context: typer.Context, store: StoreArgument) -> ExitCode:
    """Read every byte; exit with 1 and name each shard that is not what was written, or missing."""
    from clients.store.checks import counted, damages

    found = list(damages(store))
    sequences, expected = counted(store)
    record = {
        "path": str(store),
        "sound": not found,
        "complete": sequences == expected,
        "sequences": sequences,
        "sequences_expected": expected,
        "damages": found,
    }
    lines = found or [f"{store}: sound"]
    if sequences != expected:
        lines.append(f"incomplete: {sequences} of {expected} sequences; resume its capture")
    settings_of(context).output.result(record, "\n".join(lines))
    return ExitCode.JOB_FAILED if found or sequences != expected else ExitCode.OK


@app.command()
def merge(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    parts: Annotated[list[Path], typer.Argument(metavar="STORE...", help="All parts.")],
) -> None:
    """Join the stores of `distill capture --shard I/N`, as hard links where that is possible."""
    from clients.store.merge import merge as merge_stores

    sequences = merge_stores(out, parts)
    record = {"path": str(out), "sequences": sequences}
    settings_of(context).output.result(record, f"{out}: {sequences} sequences")


@app.command()
def sample(
    context: typer.Context,
    store: StoreArgument,
    sequence: Annotated[int, typer.Option(help="Which one; -1 is the last.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows shown.")] = 8,
    head: Annotated[int, typer.Option(min=1, help="Head ids of a row shown.")] = 4,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="By default the capture's, if it is here.")
    ] = None,
) -> None:
    """Rows of one sequence for people: the token, its probability, the likeliest others."""
    from clients.store.sample import sample_of

    found = sample_of(store, sequence, rows=rows, head=head, tokenizer=tokenizer)
    settings_of(context).output.result(found, _told(found))


def _told(found: Mapping[str, Any]) -> str:
    lines = [
        f"sequence {found['sequence']}: {found['tokens']} tokens, scored from {found['start']}"
    ]
    if found["prompt"] is not None:
        lines += [f"prompt  {plain(found['prompt'])}", f"scored  {plain(found['scored'])}"]
    for row in found["rows"]:
        likeliest = "  ".join(f"{_named(one)} {one['probability']:.4f}" for one in row["head"])
        token = f"{row['position']:>6}  {_named(row)} {row['probability']:.4f}"
        drawn = "  ".join(map(_named, row["drawn"]))
        lines.append(f"{token}  |  {likeliest}  |  tail {row['tail']:.2g}  {drawn}".rstrip())
    return "\n".join(lines)


def _named(token: Mapping[str, Any]) -> str:
    return str(token["id"]) if token["text"] is None else plain(repr(token["text"]))
