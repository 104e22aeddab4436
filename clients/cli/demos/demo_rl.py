"""`distill demo-rl`: a weak model learns addition from rewards, without a teacher."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from clients.cli.demos.demo import Overrides, clear, fill_directories, make_material
from clients.cli.output import Output
from clients.cli.settings import settings_of
from protos.errors import ExitCode
from protos.extras import require_extra
from protos.operating_system import require_linux

JOB = Path(__file__).with_name("demo_rl_job.toml")
TRAIN = (
    *("clients", "run", str(JOB), "--runs", "{jobs}"),
    *("--set", "student.model={student}", "--set", "data.path={data}/train.jsonl"),
    *("--set", "data.eval_path={data}/heldout.jsonl"),
)


@dataclass(frozen=True)
class RLDemoSummary:
    """The content of summary.json, the result of the demo.

    - `accuracy_before`, `accuracy_after`, `anchor_accuracy_after`: accuracy on held-out sums, of
      the student before and after training, and of the anchor after training
    - `kl_from_anchor`: KL of the student to the anchor in the last step
    - `steps`: number of steps
    - `seconds`: duration of the demo
    """

    accuracy_before: float
    accuracy_after: float
    anchor_accuracy_after: float
    kl_from_anchor: float
    steps: int
    seconds: float


def demo_rl(
    context: typer.Context,
    runs: Annotated[
        str,
        typer.Option(metavar="DIR", help="Directory of the demo; an earlier demo is replaced."),
    ] = "runs/demo-rl",
    overrides: Overrides = None,
) -> ExitCode:
    """Try training from rewards on this machine. Takes minutes, needs no GPU."""
    from clients.cli.demos.services import Services

    require_linux("distill demo-rl")
    require_extra("teacher,train", "distill demo-rl")
    output = settings_of(context).output
    directory = Path(runs).absolute()
    clear(directory, output)
    started_at = time.monotonic()
    changes = [part for override in overrides or () for part in ("--set", override)]
    with Services(directory / "logs") as services:
        make_material(directory, services, output)
        with output.stage("training the student from rewards"):
            services.run("train", fill_directories((*TRAIN, *changes), directory))
    summary = _summarize(directory / "jobs", time.monotonic() - started_at)
    (directory / "summary.json").write_text(
        json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8"
    )
    _print_summary(output, summary)
    return ExitCode.OK


def _summarize(jobs: Path, seconds: float) -> RLDemoSummary:
    (metrics,) = jobs.glob("*/metrics.jsonl")
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()
    ]
    first_metrics, last_metrics = lines[0], lines[-1]
    return RLDemoSummary(
        accuracy_before=first_metrics["eval/accuracy"],
        accuracy_after=last_metrics["eval/accuracy"],
        anchor_accuracy_after=last_metrics["eval/anchor/accuracy"],
        kl_from_anchor=last_metrics["kl/anchor"],
        steps=last_metrics["step"],
        seconds=round(seconds, 1),
    )


def _print_summary(output: Output, summary: RLDemoSummary) -> None:
    if output.as_json:
        output.result(asdict(summary), "")
        return
    from rich.table import Table

    title = f"{summary.steps} steps, {summary.seconds:.0f} s"
    table = Table("", "before", "after", "anchor after", title=title)
    shares = (summary.accuracy_before, summary.accuracy_after, summary.anchor_accuracy_after)
    table.add_row("accuracy", *(f"{share:.1%}" for share in shares))
    output.console(stderr=False).print(table)
