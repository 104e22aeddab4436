"""Writes docs/offline.md: the numbers of a run of the offline benchmark, and the targets."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import format_table

PAGE = """\
# Offline training: measurements

This page measures tail modes, the cost of stores, and interrupted captures. The command

<!-- needs: a quarter of an hour -->
```bash
python -m benchmarks.offline --data path/to/train.jsonl
```

wrote this page, on GSM8K ({machine}; {minutes:.0f} minutes after the two models were pretrained).

## Setup

A teacher of {teacher[0]} layers of width {teacher[1]} ({teacher[2]} steps) and a student of
{student[0]} layers of width {student[1]} ({student[2]} steps) are pretrained on the first
{records:,} records of the train split, with a byte-level BPE vocabulary of {vocabulary:,}.
`distill capture` stores the teacher's rows of the answers of the same records: {sequences:,}
sequences, {rows:,} rows. Records of more than {max_tokens} tokens are skipped. The student then
trains for {steps} steps of {per_step} sequences (`distill run`, the shipped
[job file](../deploy/jobs/gsm8k_offline.toml), learning rate 3e-3), with {seeds} seeds. No teacher
runs, and no job names a teacher. Models of this size solve no exercise, so the benchmark compares
the KL to the teacher.

## Tail modes

![Held-out KL by step, and at the end](offline.png)

Every line has the exact KL(teacher||student) and the perplexity, from the full logits of both
models, on {held_sequences} held-out records ({held_tokens:,} answer tokens). Every line has the
same student, batches, optimizer and schedule; the benchmark checks this in the metrics of the runs.
The figures are means over seeds, with minimum and maximum in brackets.

{table}

*Cross-entropy only* and *exact KL* are references, not jobs: they run the trainer with another loss
(`benchmarks/offline/reference.py`). *Cross-entropy only* uses the text without rows. *Exact KL*
loads the teacher and uses all {vocabulary:,} logits of both models, which is the upper limit for
rows.

{reading}

## Cost of a store

{stores}

*Codec* is the size of the encoded rows. *Files* is the size of all files, with keys, checksums and
the token ids of prompts and answers ({tokens_per_row:.2f} tokens per row, 4 bytes each), divided by
the number of rows.

{times}

## Interrupted capture

{killed}

## Targets

{targets}
"""


def check_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of the benchmark, with the measured values."""
    checked_targets = []

    def check(target: str, measured: str, met: bool) -> None:
        checked_targets.append({"target": target, "found": measured, "met": bool(met)})

    kills, step, capture = result["kills"], result["step"], result["capture"]
    check(
        f"sha256 of every file after {kills['kills']} kills",
        "equal" if kills["equal"] else "NOT equal",
        kills["equal"],
    )
    check("step from the store over rows in memory, at most 1.03",
          f"{step['ratio']:.3f}", step["ratio"] <= 1.03)  # fmt: skip
    check("capture over the bare engine, at least 0.95",
          f"{capture['ratio']:.3f}", capture["ratio"] >= 0.95)  # fmt: skip
    if "samples" in result["stores"]:
        size = result["stores"]["samples"]["codec_bytes"]
        only = result["sizes"]["only_samples"]
        check(f"codec bytes a row at k = 0 with {only} samples, at most 40",
              f"{size:.1f}", size <= 40)  # fmt: skip
    return checked_targets


def format_page(result: dict[str, Any]) -> str:
    """Return docs/offline.md."""
    sizes, learned, stores = result["sizes"], result["learned"], result["stores"]
    top = stores["top"]
    return PAGE.format(
        **sizes,
        machine=result["machine"],
        minutes=result["minutes"],
        sequences=top["sequences"],
        rows=top["rows"],
        tokens_per_row=top["tokens"] / top["rows"],
        held_sequences=learned["held_out"]["sequences"],
        held_tokens=learned["held_out"]["tokens"],
        table=_format_methods(learned),
        reading=_format_shares(result),
        stores=_format_stores(stores, sizes),
        times=_format_times(result),
        kills=result["kills"]["kills"],
        killed=_format_kills(result),
        targets=format_table(
            ["target", "measured", "result"],
            [
                [target["target"], target["found"], "met" if target["met"] else "not met"]
                for target in result["targets"]
            ],
        ),
    )


def _format_methods(learned: dict[str, Any]) -> str:
    before, teacher = learned["before"], learned["teacher"]
    rows = [["(the student before)", f"{before['kl']:.3f}", f"{before['perplexity']:.1f}"]]
    for method in learned["ways"]:
        cells = [
            f"{method[name]['mean']:{form}} ({min(method[name]['seeds']):{form}} to"
            f" {max(method[name]['seeds']):{form}})"
            for name, form in (("kl", ".3f"), ("perplexity", ".1f"))
        ]
        rows.append([method["name"], *cells])
    rows.append(["(the teacher)", "0", f"{teacher['perplexity']:.1f}"])
    return format_table(["loss", "held-out KL, nats per token", "perplexity"], rows)


def _format_shares(result: dict[str, Any]) -> str:
    """Return the share of the KL gap from the initial student to the exact loss, by tail mode."""
    learned = result["learned"]
    start, ceiling = learned["before"]["kl"], learned["ways"][-1]["kl"]["mean"]
    shares = [
        f"- {method['name']}: {(start - method['kl']['mean']) / (start - ceiling):.0%}"
        for method in learned["ways"][:-1]
    ]
    title = "Closed share of the KL gap between the initial student and the exact loss:"
    return "\n".join([title, "", *shares])


def _format_stores(stores: dict[str, dict[str, float]], sizes: dict[str, Any]) -> str:
    rows = []
    for name, store in stores.items():
        k, m = (sizes["top_k"], sizes["tail_samples"])
        if name.startswith("samples"):
            k, m = 0, sizes["only_samples"]
        suffix = ", held out" if name.endswith("held out") else ""
        rows.append(
            [
                f"k = {k}, M = {m}{suffix}",
                f"{store['sequences']:,}",
                f"{store['codec_bytes']:.1f}",
                f"{store['file_bytes']:.1f}",
            ]
        )
    return format_table(
        ["store", "sequences", "codec, bytes per row", "files, bytes per row"], rows
    )


def _format_times(result: dict[str, Any]) -> str:
    step, capture = result["step"], result["capture"]
    return (
        f"A training step that reads rows from the store takes {step['ratio']:.3f} times as long as"
        f" with all rows in memory (median of {step['pairs']} pairs of the same step,"
        f" {step['memory']:.3f} s each). A capture scores {capture['ratio']:.3f} times as many rows"
        " per second as its engine alone on the same batches"
        f" ({capture['engine']:.0f} rows per second; median of {len(capture['ratios'])} runs)."
        " Each process has one thread, plus a thread for the reader or the writer of the store."
    )


def _format_kills(result: dict[str, Any]) -> str:
    kills = result["kills"]
    outcome = "the same sha256 as" if kills["equal"] else "NOT the same sha256 as"
    return (
        f"A capture of all {result['stores']['top']['sequences']:,} sequences into {kills['files']}"
        f" files ({kills['bytes'] / 1e6:.1f} MB) was killed with `kill -9` {kills['kills']} times,"
        " after"
        f" {', '.join(map(str, kills['at']))} complete files, and resumed each time. At the end,"
        f" every file of the store and the manifest had {outcome} in an uninterrupted capture."
    )
