"""A server in its image, without PyTorch, runs a job on a Ray node in the image of the trainer."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.containers import Container, Images, image_of
from tests.deploy.dockerfile import TARGETS
from tests.deploy.files import DEPLOY, ROOT
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = """\
name = "on ray"
max_steps = 4
student.model = "/models/student"
data.path = "/models/data/train.jsonl"
method.type = "sft"
method.max_tokens = 24
train.prompts_per_step = 8
eval.prompts = 8
"""


def environment_of_ray() -> dict[str, str]:
    """Of the containers in kuberay/cluster.yaml."""
    _, cluster = yaml.safe_load_all((DEPLOY / "kuberay" / "cluster.yaml").read_text())
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


@pytest.fixture
def containers(images: Images) -> Iterator[dict[str, Container]]:
    made = {target: images.container(image_of(target)) for target in ("trainer", "server")}
    yield made
    for container in made.values():
        container.close()


def test_a_job_runs_on_ray(containers: dict[str, Container], models: Path, tmp_path: Path) -> None:
    gcs, page, agent, port = free_ports(4)
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / "auth_token").write_text(secrets.token_hex(32))
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", 10001, 10001)
    volumes = [
        f"{models}:/models:ro",
        f"{tmp_path}/token:/etc/distill/ray:ro",
        f"{tmp_path}/runs:/runs",
    ]
    node = ["ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"]
    node += [f"--port={gcs}", f"--dashboard-port={page}", "--dashboard-host=127.0.0.1"]
    node += [f"--dashboard-agent-listen-port={agent}", "--node-ip-address=127.0.0.1"]
    server = [*TARGETS["server"].entrypoint, "--runs=/runs", "--database=/data/server.sqlite"]
    server += [f"--port={port}", f"--ray=http://127.0.0.1:{page}", "--threads-per-job=1"]
    logs = {name: tmp_path / f"{name}.log" for name in containers}
    variables = environment_of_ray()
    options = {"environment": variables, "volumes": volumes}
    ray = containers["trainer"].start(node, logs["trainer"], **options)
    eventually(ray, logs["trainer"], "Ray runtime started")
    served = containers["server"].start(server, logs["server"], **options)
    eventually(served, logs["server"], "server listening on")
    (tmp_path / "job.toml").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "clients", "submit", str(tmp_path / "job.toml"), "--follow"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DISTILL_SERVER": f"127.0.0.1:{port}"},
    )
    said = "".join(path.read_text(errors="replace")[-3000:] for path in logs.values())
    assert done.returncode == 0, done.stdout + done.stderr + said
    assert "SUCCEEDED" in done.stdout


def eventually(process: subprocess.Popen[bytes], log: Path, line: str) -> None:
    deadline = time.monotonic() + 300
    while line not in (said := log.read_text(errors="replace")):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
