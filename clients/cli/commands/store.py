"""`distill store`: inspect, verify, merge and sample captured stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.cli.settings import settings_of
from clients.data.object_urls import place_of
from protos.errors import ExitCode
from protos.program.logs import plain

app = typer.Typer(help="Inspect, verify and merge captured stores.", no_args_is_help=True)

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="Directory or URL (s3://, gs://) of the store.")
]


@app.command()
def info(context: typer.Context, store: StoreArgument) -> None:
    """Show a store's counts, sizes, and the settings of its capture."""
    from clients.store.checks import summary_of

    summary = summary_of(place_of(store))
    width = max(map(len, summary))
    lines = (f"{key.ljust(width)}  {plain(str(value))}" for key, value in summary.items())
    settings_of(context).output.result(summary, "\n".join(lines))


@app.command()
def verify(context: typer.Context, store: StoreArgument) -> ExitCode:
    """Verify every byte of a store and name each damaged or missing shard.

    Exits with 1 if a shard is damaged or missing, or if the store is incomplete.
    """
    from clients.store.checks import count_sequences, damages

    place = place_of(store)
    damage_messages = list(damages(place))
    sequences, expected_sequences = count_sequences(place)
    record = {
        "path": place,
        "sound": not damage_messages,
        "complete": sequences == expected_sequences,
        "sequences": sequences,
        "sequences_expected": expected_sequences,
        "damages": damage_messages,
    }
    lines = damage_messages or [f"{place}: no damage"]
    if sequences != expected_sequences:
        lines.append(
            f"incomplete: {sequences} of {expected_sequences} sequences; resume the capture"
        )
    settings_of(context).output.result(record, "\n".join(lines))
    return (
        ExitCode.JOB_FAILED if damage_messages or sequences != expected_sequences else ExitCode.OK
    )


@app.command()
def merge(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create.")],
    parts: Annotated[
        list[str],
        typer.Argument(metavar="STORE...", help="Directories or URLs of the stores of all parts."),
    ],
) -> None:
    """Merge the stores of all parts of a capture (`distill capture --shard I/N`).

    Shards are hard-linked where the file system allows it, and copied otherwise.
    """
    from clients.store.merge import merge as merge_stores

    sequences = merge_stores(out, [place_of(part) for part in parts])
    record = {"path": str(out), "sequences": sequences}
    settings_of(context).output.result(record, f"{out}: {sequences} sequences")


@app.command(name="import")
def import_(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store to write.")],
    dump: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="A .jsonl file with one answer of vLLM a line: prompt_token_ids, prompt_logprobs.",
        ),
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the teacher's model or tokenizer.")
    ],
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="The teacher's number of logits, if no config.json says it."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Head ids to keep per row; default: all.")
    ] = None,
    teacher: Annotated[str, typer.Option(help="Display name of the teacher.")] = "",
) -> None:
    """Create a store from log-probs dumped by vLLM; see docs/capture.md."""
    from clients.store.import_dump import Dump, import_dump

    sequences = import_dump(out, Dump(dump, tokenizer, vocab_size, top_k, teacher))
    record = {"path": str(out), "sequences": sequences}
    settings_of(context).output.result(record, f"{out}: {sequences} sequences")


@app.command()
def sample(
    context: typer.Context,
    store: StoreArgument,
    sequence: Annotated[
        int, typer.Option(help="Index of the sequence, from 0; -1 is the last.")
    ] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of rows to show.")] = 8,
    head: Annotated[int, typer.Option(min=1, help="Maximum number of head ids per row.")] = 4,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of a tokenizer, by default the capture's if it is on this machine.",
        ),
    ] = None,
) -> None:
    """Show rows of one sequence: each token, its probability, and the most likely head ids."""
    from clients.store.sample import sample_of

    store_sample = sample_of(place_of(store), sequence, rows=rows, head=head, tokenizer=tokenizer)
    settings_of(context).output.result(store_sample, _format_sample(store_sample))


def _format_sample(sample: Mapping[str, Any]) -> str:
    lines = [
        f"sequence {sample['sequence']}: {sample['tokens']} tokens, scored from {sample['start']}"
    ]
    if sample["prompt"] is not None:
        lines += [f"prompt  {plain(sample['prompt'])}", f"scored  {plain(sample['scored'])}"]
    for row in sample["rows"]:
        likeliest = "  ".join(
            f"{_format_token(head_token)} {head_token['probability']:.4f}"
            for head_token in row["head"]
        )
        token = f"{row['position']:>6}  {_format_token(row)} {row['probability']:.4f}"
        drawn_tokens = "  ".join(map(_format_token, row["drawn"]))
        lines.append(f"{token}  |  {likeliest}  |  tail {row['tail']:.2g}  {drawn_tokens}".rstrip())
    return "\n".join(lines)


def _format_token(token: Mapping[str, Any]) -> str:
    return str(token["id"]) if token["text"] is None else plain(repr(token["text"]))
