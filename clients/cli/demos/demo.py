"""`distill demo`: make data and models, start a teacher and a server, run a job, print results."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.output import Output
from clients.cli.settings import settings_of
from protos.errors import DistillError, ExitCode, InternalFault, InvalidInput
from protos.extras import require_extra

if TYPE_CHECKING:
    from clients.cli.demos.services import Services
    from clients.config.on_policy import OnPolicyJob
    from clients.jobs.client import DistillClient
    from clients.jobs.view import JobView

# Arguments of `python -m`; {data} and the other fields are directories of the demo.
MAKE_DATA = ("student_trainer.tools.addition", "{data}", "--seed", "0")
PRETRAIN = ("student_trainer.tools.pretrain", "--data", "{data}/train.jsonl", "--loss-on", "last")
MAKE_TEACHER = (
    *PRETRAIN,
    *("--out", "{teacher}", "--tokenizer", "characters"),
    *("--layers", "3", "--width", "96", "--steps", "2000", "--until-loss", "0.01"),
)
# The student uses the teacher's tokenizer, as distillation requires.
MAKE_STUDENT = (
    *PRETRAIN,
    *("--out", "{student}", "--tokenizer", "{teacher}"),
    # Training stops while most of its answers are wrong, so that it can learn from the teacher.
    *("--layers", "2", "--width", "64", "--steps", "2000", "--learning-rate", "2e-3"),
    *("--until-loss", "0.85"),
)
EVALUATE_TEACHER = (
    *("student_trainer.tools.accuracy", "{teacher}", "--data", "{data}/heldout.jsonl"),
    *("--max-new-tokens", "4", "--json"),
)
TEACHER = (
    *("teacher_service", "--model", "{teacher}", "--port", "0"),
    # A cache in the demo's directory: with the user's cache a second demo would find its rows.
    *("--cache-dir", "{cache}"),
)
SERVER = ("distill_server", "--runs", "{jobs}", "--port", "0")
JOB = Path(__file__).with_name("demo_job.toml")
# `clear` deletes only directories that contain this file.
MARKER = ".distill-demo"


@dataclass(frozen=True)
class DemoSummary:
    """The content of summary.json: held-out accuracies, held-out KL in nats per token, seconds."""

    teacher_accuracy: float
    accuracy_before: float
    accuracy_after: float
    kl_before: float
    kl_after: float
    seconds: float
    tail: str
    top_k: int


def demo(
    context: typer.Context,
    runs: Annotated[
        str,
        typer.Option(metavar="DIR", help="Directory of the demo; an earlier demo is replaced."),
    ] = "runs/demo",
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the teacher and the server running until Ctrl-C."),
    ] = False,
) -> ExitCode:
    """Try a distillation on this machine, with teacher and server. Takes minutes, needs no GPU."""
    from clients.cli.demos.services import Services

    require_extra("teacher,train", "distill demo")
    output = settings_of(context).output
    place = Path(runs).absolute()
    clear(place, output)
    began = time.monotonic()
    with Services(place / "logs") as services:
        accuracy = _make_models(place, services, output)
        with output.stage("starting the teacher and the server"):
            teacher = services.listen("teacher", filled(TEACHER, place))
            server = services.listen("server", filled(SERVER, place))
        config, progress = _train(place, server, teacher, output)
        summary = _summary(config, progress, accuracy, time.monotonic() - began)
        (place / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
        _print(output, summary, place)
        if keep:
            _wait(output, server)
    return ExitCode.OK


def clear(place: Path, output: Output) -> None:
    """Make the directory of a demo, deleting an earlier demo in it.

    Raises InvalidInput if the directory has other content.
    """
    if place.exists() and any(place.iterdir()):
        if not (place / MARKER).exists():
            raise InvalidInput(
                f"{place} has files that no demo made",
                field="--runs",
                hint="choose an empty or a new directory",
            )
        output.say(f"replacing the earlier demo in {place}")
        shutil.rmtree(place)
    (place / "logs").mkdir(parents=True)
    (place / MARKER).touch()


def filled(command: tuple[str, ...], place: Path) -> list[str]:
    """Return the command with the demo's directories in place of {data}, {teacher} and so on."""
    names = ("data", "teacher", "student", "cache", "jobs")
    return [part.format_map({name: place / name for name in names}) for part in command]


def _make_models(place: Path, services: Services, output: Output) -> float:
    """Make the data, the teacher and the student; return the accuracy of the teacher."""
    printed = ""
    for log, title, command in (
        ("make-data", "generating the data", MAKE_DATA),
        ("make-teacher", "training a teacher from scratch", MAKE_TEACHER),
        ("make-student", "training a weaker student from scratch", MAKE_STUDENT),
        ("evaluate-teacher", "evaluating the teacher", EVALUATE_TEACHER),
    ):
        with output.stage(title):
            printed = services.run(log, filled(command, place))
    # The log also has warnings of libraries; the result is its last line.
    return float(json.loads(printed.strip().splitlines()[-1])["accuracy"])


def _train(place: Path, server: str, teacher: str, output: Output) -> tuple[OnPolicyJob, JobView]:
    from clients.config.file import load_job
    from clients.config.on_policy import OnPolicyJob
    from clients.jobs.client import DistillClient

    file = load_job(
        JOB,
        [
            f"student.model={place / 'student'}",
            f"teacher.address={teacher}",
            f"data.path={place / 'data' / 'train.jsonl'}",
            f"data.eval_path={place / 'data' / 'heldout.jsonl'}",
        ],
    )
    with DistillClient(server) as client:
        job_id = client.submit(file.config, config_text=file.text).id
        output.say(f"submitted {job_id} to the server at {server}")
        with _cancelled_on_error(client, job_id, output):
            progress = _watched(client, job_id, place, output)
        with output.stage("pulling the trained student"):
            client.pull(job_id, place / "export")
    assert isinstance(file.config, OnPolicyJob)
    return file.config, progress


def _watched(client: DistillClient, job_id: str, place: Path, output: Output) -> JobView:
    from clients.cli.live.display import display
    from clients.jobs.job import JobState
    from clients.jobs.view import JobView
    from clients.runs.directory import RunDirectory

    progress = JobView(job_id)
    # With --json only the summary goes to stdout.
    with display(output.for_people(), progress) as shown:
        for event in client.watch(job_id):
            progress.add(event)
            shown.show(event)
    if progress.state is not JobState.SUCCEEDED:
        log = RunDirectory(place / "jobs" / job_id).log_file(progress.attempt)
        log = log if log.exists() else place / "logs" / "server.log"
        raise InternalFault(
            f"job {job_id} {progress.state}: {progress.reason or 'no reason given'}",
            hint=f"read {log}",
        )
    return progress


@contextmanager
def _cancelled_on_error(client: DistillClient, job_id: str, output: Output) -> Iterator[None]:
    """Cancel the job if the demo is interrupted, because a job outlives its server."""
    from clients.cli.demos.services import uninterrupted

    try:
        yield
    except BaseException:
        output.say(f"cancelling {job_id} and stopping all processes of the demo")
        with uninterrupted(), suppress(DistillError):
            client.cancel(job_id, now=True)
            client.wait(job_id, timeout=30.0)
        raise


def _summary(
    config: OnPolicyJob, progress: JobView, accuracy: float, seconds: float
) -> DemoSummary:
    first, last = _figures(progress.evaluations[0][1]), _figures(progress.evaluations[-1][1])
    return DemoSummary(
        teacher_accuracy=accuracy,
        accuracy_before=first[0],
        accuracy_after=last[0],
        kl_before=first[1],
        kl_after=last[1],
        seconds=round(seconds, 1),
        tail=config.method.tail_mode,
        top_k=config.top_k,
    )


def _figures(evaluation: Mapping[str, float]) -> tuple[float, float]:
    return evaluation["eval/accuracy"], evaluation["eval/kl"]


def _print(output: Output, summary: DemoSummary, place: Path) -> None:
    if output.as_json:
        output.result(asdict(summary), "")
        return
    from rich.table import Table

    title = f"{summary.seconds:.0f} s, top_k {summary.top_k}, tail {summary.tail}"
    table = Table("", "teacher", "student before", "student after", title=title)
    right = (summary.teacher_accuracy, summary.accuracy_before, summary.accuracy_after)
    table.add_row("accuracy", *(f"{share:.1%}" for share in right))
    table.add_row("KL to teacher", "-", f"{summary.kl_before:.4f}", f"{summary.kl_after:.4f}")
    output.console(stderr=False).print(table)
    output.say(f"the trained student: {place / 'export'}")


def _wait(output: Output, server: str) -> None:
    output.say(f"try: distill --server {server} ls   (Ctrl-C stops the teacher and the server)")
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
