"""Debian's Prometheus and Alertmanager watch a real teacher and a real server.

`make test-monitoring` installs them.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from tests.deploy.monitoring.files import FILES, metrics, panels
from tests.deploy.monitoring.stack import Prometheus, monitoring
from tests.distill_server.conftest import eventually
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.processes import ENVIRONMENT, RealServer
from tests.forked_python import ForkedPython
from tests.scraping import metrics_address

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
ABSENT = [program for program in PROGRAMS if shutil.which(program) is None]
if ABSENT:
    pytest.skip(f"needs {', '.join(ABSENT)}: make test-monitoring", allow_module_level=True)

OF_MACHINE = {"DistillDiskNearlyFull"}  # fires if this machine's disk is nearly full
SECONDS = 180.0  # only for machines that are very busy


@pytest.mark.parametrize(
    "words",
    [
        ["promtool", "check", "config", "prometheus.yml"],
        ["promtool", "check", "rules", "rules.yml"],
        ["promtool", "test", "rules", "rules_test.yml"],
        ["amtool", "check-config", "alertmanager.yml"],
    ],
    ids=" ".join,
)
def test_their_tools_take_the_files(words: list[str]) -> None:
    process = subprocess.run(words, cwd=FILES, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


class LoggedServer(RealServer):
    """A server that writes its log to a file."""

    @property
    def log(self) -> Path:
        return self.runs.with_suffix(".log")

    def launch(self) -> subprocess.Popen[str]:
        address_options = ["--runs", str(self.runs), "--host", self.host, "--port", str(self.port)]
        options = ["--slots", "1", "--threads-per-job", "1", "--retries", "0"]
        with self.log.open("ab") as stderr:
            return ForkedPython(
                [sys.executable, "-m", "distill_server", *address_options, *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=ENVIRONMENT,
            )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LoggedServer]:
    server = LoggedServer(tmp_path / "runs")
    server.start()
    yield server
    server.clean_up()


class Teacher:
    """A real teacher that can be killed and started again on the same two ports."""

    def __init__(self, model: Path, home: Path) -> None:
        self._log = home / "teacher.log"
        self._words = ["--model", str(model), "--cache-dir", str(home / "rows")]
        self._process = ForkedTeacher(self._words, log=self._log)
        self.address = self._process.address
        self.metrics = metrics_address(self._log)

    def kill(self) -> None:
        self._process.close()

    def start(self) -> None:
        port, page = (int(address.rpartition(":")[2]) for address in (self.address, self.metrics))
        words = [*self._words, "--metrics-port", str(page)]
        self._process = ForkedTeacher(words, log=self._log, port=port)


@pytest.fixture
def material(tmp_path: Path) -> Material:
    from tests.student_trainer.tiny import save_material

    return save_material(tmp_path / "material")


@pytest.fixture
def teacher(material: Material, tmp_path: Path) -> Iterator[Teacher]:
    teacher = Teacher(material.teacher, tmp_path)
    yield teacher
    teacher.kill()


@pytest.mark.timeout(900)
def test_alerts_fire_and_every_panel_has_data(
    server: LoggedServer, teacher: Teacher, material: Material, tmp_path: Path
) -> None:
    """A job fails, the teacher dies, a job waits for it; then the teacher comes back."""
    from tests.student_trainer.tiny import job

    data = shutil.copy(material.prompts, tmp_path / "prompts.jsonl")
    endless = {"max_steps": 100_000, "teacher__patience_seconds": 1.0}
    targets = {"distill-teacher": teacher.metrics, "distill-server": metrics_address(server.log)}
    with (
        monitoring(tmp_path, targets) as (prometheus, messages),
        DistillClient(server.address) as client,
    ):
        eventually(lambda: prometheus.value("sum(up)") == 2, SECONDS, 0.5)
        assert prometheus.value('distill_server_ended_jobs_total{state="FAILED"}') == 0
        endless_job = client.submit(job(material, teacher.address, **endless))
        failing_job = client.submit(job(material, teacher.address, data__path=str(data)))
        eventually(lambda: client.get(endless_job.id).step > 0, SECONDS, 0.2)

        def empty_panels() -> list[str]:
            return [title for title, expr in panels() if not has_data(prometheus, expr)]

        eventually(lambda: not empty_panels(), SECONDS, 0.5)
        assert {name for name in metrics() if not prometheus.query(name)} == set()
        assert prometheus.firing_alerts() <= OF_MACHINE

        Path(data).unlink()
        client.cancel(endless_job.id, now=True)
        eventually(lambda: client.get(failing_job.id).state is JobState.FAILED, SECONDS, 0.2)
        waiting_job = client.submit(job(material, teacher.address, **endless))
        eventually(lambda: client.get(waiting_job.id).step > 0, SECONDS, 0.2)
        teacher.kill()
        expected = {"DistillJobFailed", "DistillTeacherDown", "DistillJobsWait"}
        eventually(lambda: expected <= prometheus.firing_alerts(), SECONDS, 0.5)
        eventually(lambda: {(name, "firing") for name in expected} <= messages.alerts, SECONDS, 0.5)

        teacher.start()
        resolved = {("DistillTeacherDown", "resolved"), ("DistillJobsWait", "resolved")}
        eventually(lambda: resolved <= messages.alerts, SECONDS, 0.5)
        assert client.get(waiting_job.id).state in (JobState.PREPARING, JobState.RUNNING)
        client.cancel(waiting_job.id, now=True)
        eventually(lambda: client.get(waiting_job.id).state is JobState.CANCELLED, SECONDS, 0.2)
        assert prometheus.firing_alerts() - OF_MACHINE == {"DistillJobFailed"}


def has_data(prometheus: Prometheus, expr: str) -> bool:
    """Whether an expression has a sample that is a number."""
    return any(not math.isnan(float(sample["value"][1])) for sample in prometheus.query(expr))
