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
    """One line of the report. A warning is only printed; a problem makes the command fail."""

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
    checks = [*_versions(), *_packages(), _sqlite(), _torch(), _ray(), *_extras()]
    with output.stage("checking the connections"):
        server = _reachable("server", settings.server)
        if settings.server == DEFAULT_SERVER and server.problem:
            # The user did not name a server, and `distill run` needs none: only a warning.
            server = Check("server", server.value, warning=server.problem)
        checks.append(server)
        if teacher:
            checks.append(_reachable("teacher", teacher))
    problems = [f"{check.name}: {check.problem}" for check in checks if check.problem]
    warnings = [f"{check.name}: {check.warning}" for check in checks if check.warning]
    output.result(
        {"checks": [asdict(c) for c in checks], "problems": problems, "warnings": warnings},
        _report(checks, problems, warnings),
    )
    return ExitCode.JOB_FAILED if problems else ExitCode.OK


def _report(checks: list[Check], problems: list[str], warnings: list[str]) -> str:
    lines = [f"{check.name:<16} {check.value}" for check in checks]
    lines += [f"warning: {warning}" for warning in warnings]
    lines += [f"problem: {problem}" for problem in problems]
    if not problems:
        cannot = [what for extra, what in EXTRAS.items() if missing_packages(extra)]
        lines.append("no problems" + (f"; cannot {'; cannot '.join(cannot)}" if cannot else ""))
    return "\n".join(lines)


def _versions() -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()} {sys.executable}")
    for package in PACKAGES:
        try:
            yield Check(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "-", problem="not installed")


def _packages() -> Iterator[Check]:
    # Other distributions on PyPI install packages of the same names over these.
    for name, module in (("protos", "protos.distill_pb2"), ("clients", "clients.runs.launch")):
        spec = importlib.util.find_spec(name)
        where = str(spec.origin) if spec else "-"
        try:
            ours = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            ours = False
        taken = (
            "another distribution hides this package; install this project in a virtual"
            " environment of its own"
        )
        yield Check(name, where, problem="" if ours else taken)


def _sqlite() -> Check:
    old = sqlite3.sqlite_version_info < SQLITE_FIXED
    fixed = ".".join(map(str, SQLITE_FIXED))
    warning = f"older than {fixed}, which fixed a rare corruption of WAL databases"
    return Check("sqlite", sqlite3.sqlite_version, warning=warning if old else "")


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "not installed; only the teacher and the trainer need it")
    # In a process of its own, so that this process does not import torch.
    probe = subprocess.run(
        [sys.executable, "-P", "-c", TORCH_PROBE], capture_output=True, text=True
    )
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return Check("torch", "broken", problem=f"the import fails: {last}")
    return Check("torch", probe.stdout.strip().splitlines()[-1])


def _ray() -> Check:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check("ray", "not installed; only --ray needs it")
    whole = importlib.util.find_spec("aiohttp") is not None
    lacking = f"its Jobs API is not installed: {install_command('ray')}"
    return Check("ray", version, warning="" if whole else lacking)


def _extras() -> Iterator[Check]:
    for extra in EXTRAS:
        missing = missing_packages(extra)
        what = f"without {', '.join(missing)}: {install_command(extra)}" if missing else "installed"
        yield Check(f"extra {extra}", what)


def _reachable(name: str, address: str) -> Check:
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
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=3.0)
            # Health checks need no token.
            if name == "server":
                DistillStub(channel).ListJobs(ListJobsRequest(limit=1), timeout=3.0)
            else:
                TeacherStub(channel).GetInfo(GetInfoRequest(), timeout=3.0)
    except grpc.RpcError as error:
        code = error.code().name
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            unknown = f"{address} does not know the token; set ${token} to one of its token file"
            return Check(name, address, problem=unknown)
        sent = sent_fault(error)
        problem = f"answers: {sent.message}" if sent else f"does not answer ({code})"
        return Check(name, address, problem=f"{address} {problem}")
    except DistillError as error:
        return Check(name, address, problem=str(error))
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Check(
        name, f"{address} serving", problem="" if serving else f"{address} is shutting down"
    )
