"""`distill doctor`: check versions, packages, devices and connections."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from clients.cli.settings import DEFAULT_SERVER, settings_of
from protos.errors import DistillError, ExitCode
from protos.extras import install_command, missing_packages

PACKAGES = ("distill-service", "grpcio", "protobuf", "pydantic", "numpy")
# Older versions can lose writes to a WAL database when two processes checkpoint it at once.
SQLITE_FIXED = (3, 51, 3)
TORCH_PROBE = (
    "import torch; print(torch.__version__ + (', ' + torch.cuda.get_device_name(0) "
    "if torch.cuda.is_available() else ', no GPU'))"
)


# Extra -> its purpose. A machine needs only the extras of its own tasks.
EXTRAS = {
    "train": "train jobs (distill run, distill-server)",
    "teacher": "run a teacher (distill-teacher) or a capture",
    "rl": "score math rewards, search, evaluate an endpoint",
    "8bit": "train with moments in 8 bits (train.optimizer)",
    "plot": "save plots as PNG",
}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    - `name`, `value`: what was checked, and the result
    - `warning`: a text that is only printed; "" means none
    - `problem`: a text about a problem, with which the command fails; "" means none
    """

    name: str
    value: str
    warning: str = ""
    problem: str = ""


def doctor(
    context: typer.Context,
    teacher: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Also check the connection to this teacher.")
    ] = "",
) -> ExitCode:
    """Check versions, packages, devices and connections; exit with 1 if there is a problem."""
    settings = settings_of(context)
    output = settings.output
    checks = [
        *_check_versions(),
        *_check_packages(),
        _check_sqlite(),
        _check_torch(),
        _check_ray(),
        *_check_extras(),
    ]
    with output.stage("checking the connections"):
        server = _check_connection("server", settings.server)
        if settings.server == DEFAULT_SERVER and server.problem:
            # The user did not name a server, and `distill run` needs none: only a warning.
            server = Check("server", server.value, warning=server.problem)
        checks.append(server)
        if teacher:
            checks.append(_check_connection("teacher", teacher))
    problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
    warnings = [f"{check.name}: {check.warning}" for check in checks if check.warning]
    output.result(
        {"checks": [asdict(c) for c in checks], "problems": problems, "warnings": warnings},
        _format_report(checks, problems, warnings),
    )
    return ExitCode.JOB_FAILED if problems else ExitCode.OK


def _format_report(checks: list[Check], problems: list[str], warnings: list[str]) -> str:
    lines = [f"{check.name:<16} {check.value}" for check in checks]
    lines += [f"warning: {warning}" for warning in warnings]
    lines += [f"problem: {problem}" for problem in problems]
    if not problems:
        missing_purposes = [purpose for extra, purpose in EXTRAS.items() if missing_packages(extra)]
        lines.append(
            "no problems"
            + (f"; cannot {'; cannot '.join(missing_purposes)}" if missing_purposes else "")
        )
    return "\n".join(lines)


def _check_versions() -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()} {sys.executable}")
    for package in PACKAGES:
        try:
            yield Check(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "-", problem="not installed")


def _check_packages() -> Iterator[Check]:
    # Other distributions on PyPI install packages of the same names over these.
    for name, module in (("protos", "protos.distill_pb2"), ("clients", "clients.runs.launch")):
        spec = importlib.util.find_spec(name)
        location = str(spec.origin) if spec else "-"
        try:
            is_this_project = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_this_project = False
        problem = (
            "another distribution hides this package; install this project in a separate"
            " virtual environment"
        )
        yield Check(name, location, problem="" if is_this_project else problem)


def _check_sqlite() -> Check:
    is_old = sqlite3.sqlite_version_info < SQLITE_FIXED
    fixed_version = ".".join(map(str, SQLITE_FIXED))
    warning = f"older than {fixed_version}, which fixed a rare corruption of WAL databases"
    return Check("sqlite", sqlite3.sqlite_version, warning=warning if is_old else "")


def _check_torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "not installed; only the teacher and the trainer need this package")
    # In a process of its own, so that this process does not import torch.
    probe = subprocess.run(
        [sys.executable, "-P", "-c", TORCH_PROBE], capture_output=True, text=True, encoding="utf-8"
    )
    if probe.returncode:
        last_line = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return Check("torch", "broken", problem=f"the import fails: {last_line}")
    return Check("torch", probe.stdout.strip().splitlines()[-1])


def _check_ray() -> Check:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check("ray", "not installed; only --ray needs this package")
    has_jobs_api = importlib.util.find_spec("aiohttp") is not None
    warning = f"the Jobs API of Ray is not installed: {install_command('ray')}"
    return Check("ray", version, warning="" if has_jobs_api else warning)


def _check_extras() -> Iterator[Check]:
    for extra in EXTRAS:
        missing = missing_packages(extra)
        status = (
            f"without {', '.join(missing)}: {install_command(extra)}" if missing else "installed"
        )
        yield Check(f"extra {extra}", status)


def _check_connection(name: str, address: str) -> Check:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from protos.distill_pb2 import ListJobsRequest
    from protos.distill_pb2_grpc import DistillStub
    from protos.rpc.channel import SERVER_TOKEN, TEACHER_TOKEN, open_channel
    from protos.rpc.statuses import sent_fault
    from protos.teacher_pb2 import GetInfoRequest
    from protos.teacher_pb2_grpc import TeacherStub

    token = SERVER_TOKEN if name == "server" else TEACHER_TOKEN
    try:
        with open_channel(address, token=token) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            health_reply = health.Check(health_pb2.HealthCheckRequest(), timeout=3.0)
            # Health checks need no token.
            if name == "server":
                DistillStub(channel).ListJobs(ListJobsRequest(limit=1), timeout=3.0)
            else:
                TeacherStub(channel).GetInfo(GetInfoRequest(), timeout=3.0)
    except grpc.RpcError as error:
        code = error.code().name
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            token_problem = (
                f"{address} does not accept the token; set ${token} to a token of its token file"
            )
            return Check(name, address, problem=token_problem)
        fault = sent_fault(error)
        problem = f"answers: {fault.message}" if fault else f"does not answer ({code})"
        return Check(name, address, problem=f"{address} {problem}")
    except DistillError as error:
        return Check(name, address, problem=str(error))
    is_serving = health_reply.status == health_pb2.HealthCheckResponse.SERVING
    return Check(
        name, f"{address} serving", problem="" if is_serving else f"{address} is shutting down"
    )
