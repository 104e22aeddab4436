"""The documents about security are correct: commands run, and minimum versions hold."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from clients.teacher.client import TeacherClient
from tests.documents import ROOT, blocks
from tests.security.conftest import DOCUMENT, Certificates
from tests.security.processes import environment

FLOORS = re.compile(
    r"^\| (torch|transformers|pyarrow|pillow|vllm|starlette|h11|grpcio) \| ([\d.]+) \|",
    re.MULTILINE,
)
REQUIREMENT = re.compile(r"^([a-z0-9-]+)(?:\[[a-z,]+\])?>=([\d.]+)")


def version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


def test_pyproject_keeps_the_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(FLOORS.findall(DOCUMENT.read_text()))
    assert len(floors) == 8
    required = [project["dependencies"], *project["optional-dependencies"].values()]
    checked_names = set()
    for requirement in itertools.chain.from_iterable(required):
        name = re.split(r"[^a-z0-9-]", requirement)[0].removesuffix("-cpu")
        if name in floors:
            floor = REQUIREMENT.match(requirement.replace("==", ">=").replace("-cpu", ""))
            assert floor, f"{requirement} has no floor"
            assert version_numbers(floor[2]) >= version_numbers(floors[name]), requirement
            checked_names.add(name)
    assert {
        "torch",
        "transformers",
        "pyarrow",
        "pillow",
        "starlette",
        "h11",
        "grpcio",
    } <= checked_names


def test_the_table_of_variables_is_the_code() -> None:
    """The document and the sources name the same environment variables."""
    sources = "".join(
        path.read_text()
        for package in ("protos", "clients", "distill_server", "teacher_service", "student_trainer")
        for path in (ROOT / package).rglob("*.py")
    )
    words = re.compile(r"DISTILL_(?:TEACHER_)?(?:TOKENS?|TLS_[A-Z]+)\b")
    assert set(words.findall(DOCUMENT.read_text())) == set(words.findall(sources))


def test_the_readme_beyond_this_machine(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run both blocks, with a fake teacher that needs no download, on one machine."""
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copy(certificates.path / name, tmp_path)
    teacher_commands, client_commands = (
        block.body for block in blocks("docs/operations.md", "beyond")
    )
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    teacher_commands = teacher_commands.replace(
        "--model Qwen/Qwen3-4B", "--engine fake --model vocab=64 --no-cache"
    )
    teacher_commands = teacher_commands.replace(
        ".venv/bin/distill-teacher", "exec .venv/bin/distill-teacher"
    )
    teacher_commands = teacher_commands.replace("--host 0.0.0.0", "--host 0.0.0.0 --port 0")
    assert teacher_commands.count("vocab=64") == teacher_commands.count("--port 0") == 1
    with subprocess.Popen(
        ["bash", "-euc", teacher_commands],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as teacher:
        try:
            assert teacher.stdout is not None
            line = teacher.stdout.readline()
            assert line.startswith("teacher listening on https://0.0.0.0:")
            port = line.strip().rpartition(":")[2]
            token = (tmp_path / "tokens").read_text().split()[1]
            client_commands = client_commands.replace("gpu-node:50052", f"localhost:{port}")
            client_commands = re.sub(
                r"DISTILL_TEACHER_TOKEN=\S+", f"DISTILL_TEACHER_TOKEN={token}", client_commands
            )
            # The job itself would take minutes; the test runs everything before it.
            commands = client_commands[: client_commands.index(".venv/bin/distill run")]
            commands += "\nenv | grep ^DISTILL_ > variables"
            process = subprocess.run(
                ["bash", "-euc", commands],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                env=environment(),
            )
            assert process.returncode == 0, process.stdout + process.stderr
            assert f"https://localhost:{port} serving" in process.stdout
            monkeypatch.chdir(tmp_path)
            for variable in (tmp_path / "variables").read_text().splitlines():
                monkeypatch.setenv(*variable.split("=", 1))
            with TeacherClient(f"https://localhost:{port}") as client:
                assert client.info().vocab_size == 64
        finally:
            teacher.kill()


@pytest.mark.slow
def test_the_server_of_the_ray_page(certificates: Certificates, tmp_path: Path) -> None:
    """Run the commands for tokens and server, with other paths and ports, without a cluster."""
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copy(certificates.path / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tokens,) = blocks("docs/ray.md", "ray-tokens")
    (slurm_tokens,) = blocks("docs/slurm.md", "slurm-tokens")
    assert set(slurm_tokens.commands) < set(tokens.commands)
    (start,) = blocks("docs/ray.md", "ray-server")
    command = start.body.replace("/shared/runs", "runs").replace("/var/lib/distill/", "")
    command = re.sub(r"(--dashboard|--metrics-port) \d+", r"\1 0", command)
    command = command.replace("--ray http://127.0.0.1:8265", "")  # the extra [ray] is not installed
    command = command.replace("--host 0.0.0.0", "--host 0.0.0.0 --port 0")
    command = command.replace(".venv/bin/distill-server", "exec .venv/bin/distill-server")
    with subprocess.Popen(
        ["bash", "-euc", f"{tokens.body}\n{command}"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    ) as server:
        try:
            assert server.stdout is not None
            line, dashboard = server.stdout.readline(), server.stdout.readline()
            assert line.startswith("server listening on https://0.0.0.0:"), line
            assert "https://0.0.0.0:" in dashboard, dashboard
            port = line.strip().rpartition(":")[2]
            token = (tmp_path / "server-tokens").read_text().split()[1]
            variables = {"DISTILL_TOKEN": token, "DISTILL_TLS_CA": "ca.pem"}
            for client_variables in (variables, {"DISTILL_TLS_CA": "ca.pem"}):
                process = subprocess.run(
                    [".venv/bin/distill", "--server", f"https://localhost:{port}", "ls"],
                    cwd=tmp_path,
                    capture_output=True,
                    text=True,
                    env=environment() | client_variables,
                )
                assert (process.returncode == 0) is (client_variables is variables), (
                    process.stdout + process.stderr
                )
        finally:
            server.kill()


def test_secrets_are_not_committed() -> None:
    process = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        pytest.skip("not a checkout")
    names = process.stdout.split()
    assert not [name for name in names if name.endswith((".key", ".pem")) or name == "tokens"]
