"""The units of deploy/systemd, installed by the commands of docs/one-machine.md and booted."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import booted
from tests.deploy.booted import Booted
from tests.deploy.containers import Images
from tests.deploy.files import ROOT
from tests.documents import blocks

pytestmark = [pytest.mark.timeout(1800)]

# The job runs until it is cancelled.
JOB = """\
name = "outlives"
max_steps = 1000000
student.model = "/srv/models/student"
teacher.address = "localhost:50052"
teacher.top_k = 4
data.path = "/srv/models/data/train.jsonl"
method.max_prompt_tokens = 16
method.max_new_tokens = 6
train.prompts_per_step = 8
eval.prompts = 8
eval.every = 1000000
checkpoint.every = 1000
"""


@pytest.fixture
def machine(images: Images, tmp_path: Path) -> Iterator[Booted]:
    """A booted machine with the trainer image's programs at the units' paths, and a model."""
    from tests.student_trainer.tiny import save_material

    if reason := booted.missing_requirement():
        pytest.skip(reason)
    container = images.container("localhost/distill-trainer:test")
    save_material(tmp_path / "models")
    (tmp_path / "models" / "job.toml").write_text(JOB)
    subprocess.run(["chmod", "--recursive", "a+rX", str(tmp_path / "models")], check=True)
    programs = container.root / "opt" / "distill-service"
    binds = {
        programs: "/opt/distill-service",
        tmp_path / "models": "/srv/models",
        ROOT / "deploy": "/src/deploy",
    }
    with tempfile.TemporaryDirectory(prefix="distill-booted-") as root:
        booted_machine = Booted(Path(root) / "root", binds, tmp_path / "console")
        yield booted_machine
        booted_machine.close()


class Job:
    """The job that runs during the test, through the command line."""

    def __init__(self, machine: Booted) -> None:
        self._machine = machine
        self.id = machine.run("distill -q submit /srv/models/job.toml").strip()

    def look(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads(self._machine.run(f"distill --json show {self.id}"))
        return job

    def trainer(self) -> int:
        """Return the pid of the trainer; fail if it is not alive."""
        card_path = f"/var/lib/distill/runs/{self.id}/logs/attempt-1/shim.json"
        pid = int(json.loads(self._machine.run(f"cat {card_path}"))["child_pid"])
        self._machine.run(f"kill -0 {pid}")
        return pid

    def goes_on(self) -> None:
        """Wait until the first attempt makes further steps."""
        step_before = self.look()["step"]
        self._machine.eventually(lambda: self.look()["step"] > step_before + 2)
        assert self.look()["attempt"] == 1


def wait_until_serving(machine: Booted, port: int) -> None:
    command = f"python -P -m protos.rpc.health localhost:{port} && echo serving || true"
    machine.eventually(lambda: machine.run(command) == "serving\n")


def test_jobs_outlive_the_server_and_servers_come_back(machine: Booted) -> None:
    (install,) = blocks("docs/one-machine.md", "systemd")
    machine.run(f"cd /src; {install.body}")
    wait_until_serving(machine, 50051)
    wait_until_serving(machine, 50052)
    assert machine.run("stat --format=%U:%a /var/lib/distill") == "distill:700\n"
    job = Job(machine)
    machine.eventually(lambda: job.look()["step"] > 2)
    trainer, server = job.trainer(), machine.main_pid("distill-server")

    machine.run("systemctl restart distill-server")
    wait_until_serving(machine, 50051)
    restarted_server = machine.main_pid("distill-server")
    assert restarted_server != server
    job.goes_on()
    assert job.trainer() == trainer

    machine.run(f"kill -KILL {restarted_server}")
    machine.eventually(lambda: machine.main_pid("distill-server") not in (0, restarted_server))
    wait_until_serving(machine, 50051)
    job.goes_on()
    assert job.trainer() == trainer

    teacher = machine.main_pid("distill-teacher")
    machine.run(f"kill -KILL {teacher}")
    machine.eventually(lambda: machine.main_pid("distill-teacher") not in (0, teacher))
    wait_until_serving(machine, 50052)
    job.goes_on()
    assert job.trainer() == trainer

    machine.run("systemctl stop distill-server")
    assert job.trainer() == trainer
    machine.run("systemctl start distill-server")
    wait_until_serving(machine, 50051)
    machine.run(f"distill -q cancel {job.id} && (distill -q watch {job.id} || test $? = 5)")
    assert job.look()["state"] == "CANCELLED"

    lines = machine.run("journalctl --unit distill-server --output cat --no-pager").splitlines()
    assert lines.count("server listening on 127.0.0.1:50051") == 4
    rows = machine.run("journalctl --unit distill-teacher --output cat --no-pager").splitlines()
    loggers = [json.loads(line)["logger"] for line in rows if line.startswith("{")]
    assert "teacher_service.serving.loading" in loggers
