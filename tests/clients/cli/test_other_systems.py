"""Every command on macOS and Windows, as far as a machine with Linux can show (tests/other_system).

A command runs, or says in one sentence that it needs Linux. A new command must be added here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients.cli.demos.demo import MODELS
from clients.config.file import is_absolute, is_file_name
from protos.errors import ExitCode
from tests.clients.cli.other_system_session import all_commands
from tests.distill_server.conftest import Server, make_server, server  # noqa: F401
from tests.other_system import environment, names_on

NAME = "gr\u00f6\u00dfe \u2192 \u6a21"
NAMES = {"darwin": "macOS", "win32": "Windows"}
LINUX = {
    "run": "run job.toml",
    "capture": "capture job.toml",
    "demo": "demo",
    "demo-rl": "demo-rl",
}
PROGRAMS = {
    "distill_server": "distill-server",
    "teacher_service": "distill-teacher",
    "student_trainer.rollout_service": "distill-rollouts",
}
# Of the client, in this order, with their exit codes.
CLIENT = [
    ("--help", 0),
    ("config check job.toml", 0),
    ("config show job.toml", 0),
    ("config schema", 0),
    ("plan job.toml", 0),
    ("pair {models}/teacher {models}/student --data daten-\u00fc.jsonl", 0),
    ("submit server.toml --dry-run", 0),
    ("submit job.toml", 0),
    ("submit job.toml --upload --follow", 0),
    ("submit job.toml --upload --dry-run", 0),
    ("ls", 0),
    ("--json ls", 0),
    ("table @last", 0),
    ("tree @last", 0),
    ("show @last", 0),
    ("watch @last", 0),
    ("logs @last", 0),
    ("plot @last -o curve.svg", 0),
    ("report @last -o report.html", 0),
    ("pull @last -o trained", 0),
    ("pull @last -o empty", 0),
    ("pin @last", 0),
    ("submit job.toml --upload --name wait_at=3", 0),
    ("cancel @last", 0),
    ("watch @last", int(ExitCode.JOB_CANCELLED)),
    ("resume @last", 0),
    ("cancel --now @last", 0),
    ("watch @last", int(ExitCode.JOB_CANCELLED)),
    ("rm --yes @last", 0),
    ("store import rows --dump dump.jsonl --tokenizer {models}/teacher", 0),
    ("store info rows", 0),
    ("store verify rows", 0),
    ("store sample rows", 0),
    ("store merge merged rows", 0),
    ("cache", 0),
    ("cache --clear", 0),
    ("token", 0),
    ("teacher ls", 0),
    ("teacher info {unused}", int(ExitCode.UNREACHABLE)),
    ("doctor", 0),
    (
        "eval m --reward f1 --data daten-\u00fc.jsonl --endpoint http://{unused}/v1 --patience 0.1",
        4,
    ),
]
ELSEWHERE = ["preview"]  # needs torch: test_programs_with_torch


@pytest.fixture(params=[pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_python(
    arguments: list[str], system: str, directory: Path
) -> subprocess.CompletedProcess[str]:
    (directory / "python").mkdir(exist_ok=True)
    variables = environment(system, directory / "python")
    variables |= {"XDG_CACHE_HOME": str(directory / "cache"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=variables,
        cwd=directory,
    )


def run_commands(commands: list[str], system: str, directory: Path, **names: object) -> list[Any]:
    words = [command.format(**names).split() for command in commands]
    (directory / "commands.json").write_text(json.dumps(words))
    session = ["-m", "tests.clients.cli.other_system_session", "commands.json"]
    process = run_python(session, system, directory)
    assert process.returncode == 0, process.stdout + process.stderr
    results: list[Any] = json.loads(process.stdout)
    return results


def test_every_command(
    system: str,
    tmp_path: Path,
    server: Server,  # noqa: F811
) -> None:
    covered = {command.split()[0]: command for command, _ in CLIENT} | LINUX
    assert {command[0] for command in all_commands()} - {*covered, *ELSEWHERE} == set()
    (tmp_path / "daten-\u00fc.jsonl").write_text(
        '{"prompt": "gr\u00f6\u00dfer?", "answer": "\u2192 ja \u6a21"}\n' * 20
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "python" / "torch").mkdir(parents=True)
    (tmp_path / "python" / "torch" / "__init__.py").write_text(
        "import types\n__version__ = '2'\ncuda = types.SimpleNamespace(is_available=lambda: False)"
    )
    (tmp_path / "job.toml").write_text(
        f'name = "{NAME}"\nstudent.model = "{MODELS}/student"\nmax_steps = 6\n'
        'data.path = "daten-\u00fc.jsonl"\nmethod.type = "sft"\n',
        encoding="utf-8",
    )
    (tmp_path / "server.toml").write_text(
        'student.model = "org/model"\ndata.path = "/data/of/server.jsonl"\nmethod.type = "sft"\n'
    )
    logprobs = [None, *[{"5": {"logprob": -0.5, "rank": 1}, "6": {"logprob": -1.5, "rank": 2}}] * 3]
    answer = {"prompt_token_ids": [1, 5, 6, 5], "prompt_logprobs": logprobs}
    (tmp_path / "dump.jsonl").write_text(json.dumps(answer))
    commands = [f"--server {server.address} {c}" if c != "--help" else c for c, _ in CLIENT]
    results = run_commands(commands, system, tmp_path, models=MODELS, unused="127.0.0.1:9")
    for (command, expected), (code, text) in zip(CLIENT, results, strict=True):
        if (command, system) == ("submit job.toml", "win32"):
            assert code == ExitCode.USAGE
            assert "student.model: " in text
            assert "send the file with distill submit --upload" in text
        else:
            assert code == expected, f"{command}: {text}"
    assert NAME in results[CLIENT.index(("ls", 0))][1]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert NAME in page


def test_programs_that_need_linux(system: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('student.model = "s"\ndata.path = "d"\n')
    hint = (
        "; run it on Linux, in WSL or in the container; this machine can be a client of a job"
        " server: distill submit\n"
    )
    results = run_commands([*LINUX.values()], system, tmp_path)
    for name, result in zip(LINUX, results, strict=True):
        sentence = f"error: distill {name} needs Linux, and this is {NAMES[system]}{hint}"
        assert result == [ExitCode.USAGE, sentence]
    for module, program in PROGRAMS.items():
        process = run_python(["-m", module, "--help"], system, tmp_path)
        sentence = f"error: {program} needs Linux, and this is {NAMES[system]}{hint}"
        assert (process.returncode, process.stderr) == (ExitCode.USAGE, sentence)


PYTHON = """
import clients, os
from pathlib import Path
from clients.jobs.download import Download
from clients.runs.file_system import lock_file
from clients.store.cache_entries import delete_entry, locked_entry
from protos import distill_pb2 as pb
from protos.errors import Corrupt
from protos.operating_system import write_at

assert all(getattr(clients, name) for name in clients.__all__)
place = Path("entry")
with locked_entry(place):
    (place / "records").write_bytes(b"abc")
    assert not delete_entry(place)
with open(place / "records", "r+b") as file:
    write_at(file.fileno(), b"X", 1)
assert (place / "records").read_bytes() == b"aXc"
assert delete_entry(place)
assert not (place / "records").exists()
with Path("lock").open("a") as first, Path("lock").open("a") as second:
    lock_file(first, Path("lock"), wait=False)
    try:
        lock_file(second, Path("lock"), wait=False)
    except BlockingIOError:
        print("held")
for path in ("../x", "/x", "a\\\\..\\\\..\\\\x", "C:x"):
    try:
        with Download(Path("out")) as download:
            download.add(pb.ArtifactChunk(path=path, data=b"x"))
            print("written", path)
    except Corrupt as error:
        print(error.message)
"""


def test_python(system: str, tmp_path: Path) -> None:
    process = run_python(["-c", PYTHON], system, tmp_path)
    assert process.returncode == 0, process.stderr
    held, *paths = process.stdout.splitlines()
    assert held == "held"
    refused = [line.startswith("the server sent a path outside") for line in paths]
    # A backslash and a colon are letters of a name, except on Windows.
    assert refused == [True, True, system == "win32", system == "win32"]


def test_what_the_systems_lack() -> None:
    """The oracle has the facts of Python's documentation."""
    assert "flock" in names_on("fcntl", "linux") & names_on("fcntl", "darwin")
    assert names_on("fcntl", "win32") == names_on("pwd", "win32") == set()
    assert {"sched_getaffinity", "pidfd_open"} <= names_on("os", "linux") - names_on("os", "darwin")
    assert {"SIGKILL", "SIGHUP"} <= names_on("signal", "darwin") - names_on("signal", "win32")
    assert {"getuid", "killpg", "fork"} <= names_on("os", "darwin") - names_on("os", "win32")


@pytest.mark.parametrize(
    ("name", "absolute", "is_file"),
    [
        ("/data/x", True, True),
        (r"C:\Users\me\rows", True, True),
        ("C:/Users/me/rows", True, True),
        (r"data\train", False, True),
        ("org/model", False, False),
        ("train.jsonl", False, True),
    ],
)
def test_paths(name: str, absolute: bool, is_file: bool) -> None:
    assert is_absolute(name) is absolute
    assert is_file_name(name) is is_file
