"""The wheel in an environment that has its base dependencies and none of its extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from clients import LogitStore
from clients.store.shards import StoredRows
from protos import extras

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (
        ["distill-teacher", "--model", "x"],
        "distill-teacher needs httpx, pyarrow, redis, safetensors, torch, transformers, which",
    ),
    (
        ["distill-rollouts", "--model", "x"],
        "distill-rollouts needs accelerate, safetensors, torch, transformers, which",
    ),
    (
        ["distill", "demo"],
        "distill demo needs httpx, pyarrow, redis, safetensors, torch, transformers, accel",
    ),
    (
        ["distill", "demo-rl"],
        "distill demo-rl needs httpx, pyarrow, redis, safetensors, torch, transformers, accel",
    ),
    (["distill", "run", "{job}"], "method.type: training needs accelerate, datasets, peft,"),
    (
        ["distill", "capture", "{capture}"],
        "method.type: a capture needs httpx, pyarrow, redis, safetensors, torch,",
    ),
    (["distill", "eval", "x", "--reward", "f1", "--data", "{data}"], "MODEL: the evaluation of a"),
    (
        [
            "distill",
            "eval",
            "x",
            "--reward",
            "math",
            "--endpoint",
            "http://localhost:1/v1",
            "--data",
            "{data}",
        ],
        "--endpoint: an evaluation over an endpoint needs httpx,",
    ),
    (["distill-server", "--ray", "http://localhost:1"], "--ray: Ray is not installed"),
    (["distill", "store", "info", "{place}/store"], "reading or writing a store needs pyarrow"),
    (["distill", "store", "sample", "{place}/store"], "reading or writing a store needs pyarrow"),
    (["distill", "store", "info", "{place}"], ""),
]


@pytest.fixture(scope="module")
def install_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment `env` with the wheel and its base dependencies, and job files."""
    directory = tmp_path_factory.mktemp("base")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "env", with_pip=False)
    (site,) = (directory / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (info,) = site.glob("distill_service-*.dist-info")
    (info / "direct_url.json").write_text(f'{{"url": "file://{wheel}", "archive_info": {{}}}}')
    for name in base_dependencies():
        distribution = importlib.metadata.distribution(name)
        for top_level_name in {
            file.parts[0] for file in distribution.files or () if file.parts[0] != ".."
        }:
            if not (site / top_level_name).exists() and top_level_name != "__pycache__":
                (site / top_level_name).symlink_to(
                    Path(str(distribution.locate_file(top_level_name)))
                )
    for point in importlib.metadata.PathDistribution(info).entry_points:
        if point.group == "console_scripts":
            script = directory / "env" / "bin" / point.name
            call = (
                f"import sys\nfrom {point.module} import {point.attr}\nsys.exit({point.attr}())\n"
            )
            script.write_text(f"#!{directory}/env/bin/python\n{call}")
            script.chmod(0o755)
    (directory / "job.toml").write_text(
        'student.model = "s"\nteacher.address = "x:1"\ndata.path = "d"\n'
    )
    (directory / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with LogitStore(directory / "store", write=True) as store:
        store.append([StoredRows(bytes(32), bytes(4), 0, b"")])
    (directory / "capture.toml").write_text('teacher.model = "t"\ndata.path = "d"\n')
    return directory


def base_dependencies() -> set[str]:
    """Return the names of all distributions of the base install, with indirect dependencies."""
    names: set[str] = set()
    pending = [extras.DISTRIBUTION]
    while pending:
        for requirement in importlib.metadata.requires(pending.pop()) or ():
            match = re.match(r"[\w.-]+", requirement)
            assert match is not None
            if "extra ==" in requirement or match[0] in names:
                continue
            try:
                importlib.metadata.distribution(match[0])
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform or Python
            names.add(match[0])
            pending.append(match[0])
    return names


def run_installed(install_directory: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    names = {
        "job": install_directory / "job.toml",
        "capture": install_directory / "capture.toml",
        "data": install_directory / "data.jsonl",
        "place": install_directory,
    }
    program, *arguments = [word.format(**names) for word in command]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DISTILL"))
    }
    return subprocess.run(
        [install_directory / "env" / "bin" / program, *arguments],
        capture_output=True,
        text=True,
        cwd=install_directory,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=lambda value: str(value)[:40])
def test_a_missing_extra_is_one_sentence(
    install_directory: Path, command: list[str], message: str
) -> None:
    process = run_installed(install_directory, command)
    assert process.returncode in (2, 3), process.stdout + process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not message or re.search(r"; pip install '/.*\.whl\[[\w,]+\]'$", line), line
    assert not (install_directory / "runs").exists()


@pytest.mark.parametrize(
    "program", ["distill", "distill-server", "distill-teacher", "distill-rollouts"]
)
def test_version_and_help(install_directory: Path, program: str) -> None:
    process = run_installed(install_directory, [program, "--version"])
    assert (process.returncode, process.stdout) == (0, f"distill-service {extras.version()}\n")
    for option in ("-h", "--help"):
        assert "--version" in run_installed(install_directory, [program, option]).stdout


def test_doctor_says_what_is_missing(install_directory: Path) -> None:
    process = run_installed(install_directory, ["distill", "doctor"])
    assert process.returncode == 0, process.stdout + process.stderr
    assert "torch            not installed" in process.stdout
    assert re.search(
        r"^extra train +without accelerate, .*: pip install '/.*\[train\]'$", process.stdout, re.M
    )
    assert "no problems; cannot train jobs" in process.stdout


def test_a_server_refuses_what_it_cannot_run(install_directory: Path) -> None:
    """The job is refused before it is queued, because it could only fail without torch."""
    code = (
        "import asyncio, pathlib\n"
        "from clients import load_job\n"
        "from distill_server.jobs.preflight import JobPreflight\n"
        "config = load_job('job.toml').config\n"
        "asyncio.run(JobPreflight()(config, pathlib.Path('runs/x')))\n"
    )
    process = run_installed(install_directory, ["python", "-c", code])
    assert "InvalidInput: method.type: training needs accelerate, " in process.stderr
