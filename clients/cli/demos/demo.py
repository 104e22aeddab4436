"""`distill demo`: starts a teacher and a server, runs a small job, and prints the result."""

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
from protos.operating_system import require_linux

if TYPE_CHECKING:
    from clients.cli.demos.services import Services
    from clients.config.on_policy import OnPolicyJob
    from clients.jobs.client import DistillClient
    from clients.jobs.view import JobView

# Made by benchmarks.evidence.demo_models: a teacher that adds, and a student that noise on its
# weights has damaged. If the demo trained the two models, they would differ between processors.
MODELS = Path(__file__).with_name("models")
# Arguments of `python -m`; {data} and the other fields are directories of the demo.
MAKE_DATA = ("student_trainer.tools.addition", "{data}", "--seed", "0")
EVALUATE_TEACHER = (
    *("student_trainer.tools.accuracy", "{teacher}", "--data", "{data}/heldout.jsonl"),
    *("--max-new-tokens", "4", "--json"),
)
TEACHER = (
    *("teacher_service", "--model", "{teacher}", "--port", "0"),
    # A cache in the demo's directory: a second demo must not find the rows of the first demo.
    *("--cache-dir", "{cache}"),
)
SERVER = ("distill_server", "--runs", "{jobs}", "--port", "0")
JOB = Path(__file__).with_name("demo_job.toml")
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key of the job file. Repeatable."
    ),
]
# `clear` deletes only directories that contain this file.
MARKER = ".distill-demo"


@dataclass(frozen=True)
class DemoSummary:
    """The content of summary.json, the result of the demo.

    - `teacher_accuracy`, `accuracy_before`, `accuracy_after`: accuracy on held-out sums, of the
      teacher, and of the student before and after training
    - `kl_before`, `kl_after`: held-out KL before and after training, nats per token
    - `seconds`: duration of the demo
    - `tail`, `top_k`: keys of the job
    """

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
    overrides: Overrides = None,
) -> ExitCode:
    """Try a distillation on this machine, with teacher and server. Takes minutes, needs no GPU."""
    from clients.cli.demos.services import Services

    require_linux("distill demo")
    require_extra("teacher,train", "distill demo")
    output = settings_of(context).output
    directory = Path(runs).absolute()
    clear(directory, output)
    started_at = time.monotonic()
    with Services(directory / "logs") as services:
        make_material(directory, services, output)
        accuracy = _measure_teacher(directory, services, output)
        with output.stage("starting the teacher and the server"):
            teacher = services.listen("teacher", fill_directories(TEACHER, directory))
            server = services.listen("server", fill_directories(SERVER, directory))
        config, progress = _train_student(directory, server, teacher, overrides or [], output)
        summary = _summarize(config, progress, accuracy, time.monotonic() - started_at)
        (directory / "summary.json").write_text(
            json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8"
        )
        _print_summary(output, summary, directory)
        if keep:
            _wait_for_interrupt(output, server)
    return ExitCode.OK


def clear(directory: Path, output: Output) -> None:
    """Create the directory of a demo. Delete an earlier demo in this directory.

    Raises InvalidInput if the directory has other files.
    """
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise InvalidInput(
                f"{directory} has files of another program",
                field="--runs",
                hint="choose an empty or a new directory",
            )
        output.say(f"replacing the earlier demo in {directory}")
        shutil.rmtree(directory)
    (directory / "logs").mkdir(parents=True)
    (directory / MARKER).touch()


def fill_directories(command: tuple[str, ...], directory: Path) -> list[str]:
    """Return the parts of a command with paths instead of {data}, {teacher}, {student} and so on.

    The paths are subdirectories of the demo's `directory`.
    """
    names = ("data", "teacher", "student", "cache", "jobs")
    return [part.format_map({name: directory / name for name in names}) for part in command]


def make_material(directory: Path, services: Services, output: Output) -> None:
    """Copy the shipped models to `directory`, and write the data set of sums there."""
    for name in ("teacher", "student"):
        shutil.copytree(MODELS / name, directory / name)
    with output.stage("generating the data"):
        services.run("make-data", fill_directories(MAKE_DATA, directory))


def _measure_teacher(directory: Path, services: Services, output: Output) -> float:
    """Return the teacher's accuracy on the held-out sums."""
    with output.stage("evaluating the teacher"):
        printed = services.run("evaluate-teacher", fill_directories(EVALUATE_TEACHER, directory))
    # The output also has warnings of libraries; the result is its last line.
    return float(json.loads(printed.strip().splitlines()[-1])["accuracy"])


def _train_student(
    directory: Path, server: str, teacher: str, overrides: list[str], output: Output
) -> tuple[OnPolicyJob, JobView]:
    from clients.config.file import load_job
    from clients.config.on_policy import OnPolicyJob
    from clients.jobs.client import DistillClient

    file = load_job(
        JOB,
        [
            f"student.model={directory / 'student'}",
            f"teacher.address={teacher}",
            f"data.path={directory / 'data' / 'train.jsonl'}",
            f"data.eval_path={directory / 'data' / 'heldout.jsonl'}",
            *overrides,
        ],
    )
    with DistillClient(server) as client:
        job_id = client.submit(file).id
        output.say(f"submitted {job_id} to the server at {server}")
        with _cancelled_on_error(client, job_id, output):
            progress = _watch_job(client, job_id, directory, output)
        with output.stage("pulling the trained student"):
            client.pull(job_id, directory / "export")
    assert isinstance(file.config, OnPolicyJob)
    return file.config, progress


def _watch_job(client: DistillClient, job_id: str, directory: Path, output: Output) -> JobView:
    from clients.cli.live.display import display
    from clients.jobs.job import JobState
    from clients.jobs.view import JobView
    from clients.runs.directory import RunDirectory

    progress = JobView(job_id)
    # With --json only the summary goes to stdout.
    with display(output.for_people(), progress) as view:
        for event in client.watch(job_id):
            progress.add(event)
            view.show(event)
    if progress.state is not JobState.SUCCEEDED:
        log = RunDirectory(directory / "jobs" / job_id).log_file(progress.attempt)
        log = log if log.exists() else directory / "logs" / "server.log"
        raise InternalFault(
            f"job {job_id} {progress.state}: {progress.reason or 'no reason given'}",
            hint=f"read {log}",
        )
    return progress


@contextmanager
def _cancelled_on_error(client: DistillClient, job_id: str, output: Output) -> Iterator[None]:
    """If an exception leaves the block, cancel the job and wait up to 30 s for its end.

    Without this, the job would continue after the demo has stopped the server.
    """
    from clients.cli.demos.services import uninterrupted

    try:
        yield
    except BaseException:
        output.say(f"cancelling {job_id} and stopping all processes of the demo")
        with uninterrupted(), suppress(DistillError):
            client.cancel(job_id, now=True)
            client.wait(job_id, timeout=30.0)
        raise


def _summarize(
    config: OnPolicyJob, progress: JobView, accuracy: float, seconds: float
) -> DemoSummary:
    before, after = (
        _accuracy_and_kl(progress.evaluations[0][1]),
        _accuracy_and_kl(progress.evaluations[-1][1]),
    )
    return DemoSummary(
        teacher_accuracy=accuracy,
        accuracy_before=before[0],
        accuracy_after=after[0],
        kl_before=before[1],
        kl_after=after[1],
        seconds=round(seconds, 1),
        tail=config.method.tail_mode,
        top_k=config.top_k,
    )


def _accuracy_and_kl(evaluation: Mapping[str, float]) -> tuple[float, float]:
    return evaluation["eval/accuracy"], evaluation["eval/kl"]


def _print_summary(output: Output, summary: DemoSummary, directory: Path) -> None:
    if output.as_json:
        output.result(asdict(summary), "")
        return
    from rich.table import Table

    title = f"{summary.seconds:.0f} s, top_k {summary.top_k}, tail {summary.tail}"
    table = Table("", "teacher", "student before", "student after", title=title)
    accuracies = (summary.teacher_accuracy, summary.accuracy_before, summary.accuracy_after)
    table.add_row("accuracy", *(f"{share:.1%}" for share in accuracies))
    table.add_row("KL to teacher", "-", f"{summary.kl_before:.4f}", f"{summary.kl_after:.4f}")
    output.console(stderr=False).print(table)
    output.say(f"the trained student: {directory / 'export'}")


def _wait_for_interrupt(output: Output, server: str) -> None:
    output.say(f"try: distill --server {server} ls   (Ctrl-C stops the teacher and the server)")
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
