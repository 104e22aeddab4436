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
    (["distill", "eval", "x", "--reward", "f1", "--data", "{job}"], "MODEL: the evaluation of a"),
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
            "{job}",
        ],
        "--endpoint: an evaluation over an endpoint needs httpx,",
    ),
    (["distill-server", "--ray", "http://localhost:1"], "--ray: Ray is not installed"),
    (["distill", "store", "info", "{place}/store"], "reading or writing a store needs pyarrow"),
    (["distill", "store", "sample", "{place}/store"], "reading or writing a store needs pyarrow"),
    (["distill", "store", "info", "{place}"], ""),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment `env` with the wheel and its base dependencies, and job files."""
    place = tmp_path_factory.mktemp("base")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "env", with_pip=False)
    (site,) = (place / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (info,) = site.glob("distill_service-*.dist-info")
    (info / "direct_url.json").write_text(f'{{"url": "file://{wheel}", "archive_info": {{}}}}')
    for name in base_dependencies():
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (site / top).exists() and top != "__pycache__":
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    for point in importlib.metadata.PathDistribution(info).entry_points:
        if point.group == "console_scripts":
            script = place / "env" / "bin" / point.name
            call = (
                f"import sys\nfrom {point.module} import {point.attr}\nsys.exit({point.attr}())\n"
            )
            script.write_text(f"#!{place}/env/bin/python\n{call}")
            script.chmod(0o755)
    (place / "job.toml").write_text(
        'student.model = "s"\nteacher.address = "x:1"\ndata.path = "d"\n'
    )
    with LogitStore(place / "store", write=True) as store:
        store.append([StoredRows(bytes(32), bytes(4), 0, b"")])
    (place / "capture.toml").write_text('teacher.model = "t"\ndata.path = "d"\n')
    return place


def base_dependencies() -> set[str]:
    """The distributions that the base install brings, and what they need."""
    found: set[str] = set()
    waiting = [extras.DISTRIBUTION]
    while waiting:
        for requirement in importlib.metadata.requires(waiting.pop()) or ():
            match = re.match(r"[\w.-]+", requirement)
            assert match is not None
            if "extra ==" in requirement or match[0] in found:
                continue
            try:
                importlib.metadata.distribution(match[0])
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform or Python
            found.add(match[0])
            waiting.append(match[0])
    return found


def run(place: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    names = {"job": place / "job.toml", "capture": place / "capture.toml", "place": place}
    program, *arguments = [part.format(**names) for part in command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DISTILL"))}
    return subprocess.run(
        [place / "env" / "bin" / program, *arguments],
        capture_output=True,
        text=True,
        cwd=place,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=lambda value: str(value)[:40])
def test_a_missing_extra_is_one_sentence(place: Path, command: list[str], expected: str) -> None:
    done = run(place, command)
    assert done.returncode in (2, 3), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {expected}")
    assert not expected or re.search(r"; pip install '/.*\.whl\[[\w,]+\]'$", line), line
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    "program", ["distill", "distill-server", "distill-teacher", "distill-rollouts"]
)
def test_version_and_help(place: Path, program: str) -> None:
    done = run(place, [program, "--version"])
    assert (done.returncode, done.stdout) == (0, f"distill-service {extras.version()}\n")
    for option in ("-h", "--help"):
        assert "--version" in run(place, [program, option]).stdout


def test_doctor_says_what_is_missing(place: Path) -> None:
    done = run(place, ["distill", "doctor"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch            not installed" in done.stdout
    assert re.search(
        r"^extra train +without accelerate, .*: pip install '/.*\[train\]'$", done.stdout, re.M
    )
    assert "no problems; cannot train jobs" in done.stdout


def test_a_server_refuses_what_it_cannot_run(place: Path) -> None:
    """Before it is queued; a server without torch accepted jobs that all failed."""
    code = (
        "import asyncio, pathlib\n"
        "from clients import load_job\n"
        "from distill_server.jobs.preflight import JobPreflight\n"
        "config = load_job('job.toml').config\n"
        "asyncio.run(JobPreflight()(config, pathlib.Path('runs/x')))\n"
    )
    done = run(place, ["python", "-c", code])
    assert "InvalidInput: method.type: training needs accelerate, " in done.stderr
