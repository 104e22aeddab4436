"""A real teacher while it loads: who calls learns how far it is, and nobody's query is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.cli.commands.doctor import _check_connection
from clients.cli.live.foreground_teacher import wait_for_teachers
from clients.cli.output import Output
from clients.config.on_policy import OnPolicyJob
from clients.runs.directory import RunDirectory
from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from distill_server.teachers.home import Record, read_stage
from distill_server.teachers.started import TeacherProcess
from protos import teacher_pb2
from protos.errors import DistillError, Unavailable
from protos.rpc.ports import free_ports
from protos.rpc.statuses import fault_of
from protos.teacher_pb2_grpc import TeacherStub
from tests.distill_server.conftest import eventually
from tests.forked_python import ForkedPython
from tests.scraping import scrape, status

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
QUERY = ScoreQuery(np.arange(9, dtype=np.int32), 1, top_k=2)


@dataclass(frozen=True)
class GatedTeacher:
    process: subprocess.Popen[str]
    address: str
    gate: Path
    log: Path
    page: str
    front: str

    def fault(self) -> DistillError:
        """What a call that does not wait gets."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                TeacherStub(channel).GetInfo(teacher_pb2.GetInfoRequest(), timeout=10)
            except grpc.RpcError as error:
                return fault_of(error, "teacher")
        raise AssertionError("it answers")

    def is_in_the_weights(self) -> bool:
        return "weights: 4" in self.fault().message or "weights: 5" in self.fault().message

    def go_on(self) -> None:
        self.gate.touch()
        assert self.process.stdout
        assert self.process.stdout.readline() == f"teacher listening on {self.address}\n"
        assert self.process.stdout.readline() == f"HTTP on http://{self.front}\n"


@pytest.fixture
def loading(tmp_path: Path, tiny_model: Path) -> Iterator[GatedTeacher]:
    """A teacher that holds 40% of its weights, and waits for a file to go on."""
    (port, page, front), gate, log = free_ports(3), tmp_path / "gate", tmp_path / "teacher.log"
    command = [sys.executable, "-m", "tests.teacher_service.serving.gated_teacher"]
    options = ["--model", str(tiny_model), "--no-cache", "--port", str(port)]
    options += ["--metrics-port", str(page), "--http-port", str(front)]
    environment = {**os.environ, "GATE": str(gate), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as stderr:
        process = ForkedPython(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    with process:
        places = [f"127.0.0.1:{free_port}" for free_port in (port, page, front)]
        teacher = GatedTeacher(process, places[0], gate, log, *places[1:])
        try:
            eventually(teacher.is_in_the_weights)
            yield teacher
        finally:
            process.kill()


def test_callers_learn_the_share_and_their_queries_wait(loading: GatedTeacher) -> None:
    message_pattern = re.compile(r"the model is loading \(reading its weights: (4\d|5\d)%\)")
    fault = loading.fault()
    assert isinstance(fault, Unavailable)
    assert message_pattern.fullmatch(fault.message), fault
    with TeacherClient(loading.address, patience_seconds=1.0) as client:
        with pytest.raises(Unavailable, match="answers: the model is loading"):
            client.info()
        answer: Future[object] = client.submit(QUERY)  # type: ignore[assignment]
        with pytest.raises(TimeoutError):
            answer.result(2)  # twice its patience
        loading.go_on()
        assert len(answer.result(60)) == 8  # type: ignore[arg-type]
        assert client.info().engine == "hf"
    problem = _check_connection("teacher", loading.address).problem
    assert problem == ""


def test_a_run_waits_and_tells_the_share(
    loading: GatedTeacher, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer than `teacher.patience_seconds`; a teacher that is away is waited for that long."""
    config = OnPolicyJob.model_validate(
        {
            "student": {"model": "m"},
            "data": {"path": "d"},
            "teacher": {"address": loading.address, "patience_seconds": 0.01},
        }
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_teachers, config, Output())
        sentence = "answers: the model is loading (reading its weights: "
        printed_text = ""
        while sentence not in printed_text:
            assert not waiting.done()
            printed_text += capsys.readouterr().err
        loading.go_on()
        waiting.result(60)
    assert printed_text.startswith(
        f"WAITING teacher.address: the teacher at {loading.address} {sentence}"
    )
    loading.process.kill()
    loading.process.wait()
    with pytest.raises(Unavailable, match=r"no teacher answers at .* for 0.01 s \(teacher.pat"):
        wait_for_teachers(config, Output())


def test_doctor_tells_the_share(loading: GatedTeacher) -> None:
    problem = _check_connection("teacher", loading.address).problem
    assert problem.startswith(f"{loading.address} answers: the model is loading (reading")


def test_probes_over_http(loading: GatedTeacher) -> None:
    """Alive from the start on, ready once it answers."""
    page = loading.page
    assert (status(page, "/healthz"), status(page, "/readyz")) == (200, 503)
    assert scrape(page)["distill_teacher_ready"] == 0
    loading.go_on()
    assert (status(page, "/healthz"), status(page, "/readyz")) == (200, 200)
    assert scrape(page)["distill_teacher_ready"] == 1


def test_callers_over_http_learn_the_share(loading: GatedTeacher) -> None:
    """The requests that trainers send at first, and the probe."""
    body = {"prompt": [1, 2, 3], "max_tokens": 0, "prompt_logprobs": 1}
    with httpx.Client(base_url=f"http://{loading.front}") as client:
        early = [
            client.get("/health"),
            client.get("/v1/models"),
            client.post("/v1/completions", json=body),
        ]
        for answer in early:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            message = answer.json()["error"]["message"]
            assert re.fullmatch(
                r"the model is loading \(reading its weights: (4|5)\d%\);"
                " wait until the model is loaded",
                message,
            )
        loading.go_on()
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200


def test_health_says_not_serving_until_the_model_is_loaded(loading: GatedTeacher) -> None:
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(loading.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(request, timeout=10).status == NOT_SERVING
        watch = health.Watch(request)
        assert next(watch).status == NOT_SERVING
        loading.go_on()
        assert next(watch).status == SERVING
        assert health.Check(request, timeout=10).status == SERVING
        loading.process.terminate()
        assert next(watch).status == NOT_SERVING
        assert next(watch, None) is None
    assert loading.process.wait(30) == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_load(loading: GatedTeacher, signum: signal.Signals, code: int) -> None:
    loading.process.send_signal(signum)
    assert loading.process.wait(30) == code
    assert "Traceback" not in loading.log.read_text()


def test_the_log_has_the_share(loading: GatedTeacher) -> None:
    """A job server reads it there, for the phase of the jobs that wait for the teacher."""
    eventually(lambda: re.fullmatch(r"reading its weights: (4\d|5\d)%", read_stage(loading.log)))
    loading.go_on()


def test_the_phase_of_a_job_that_waits_for_it(loading: GatedTeacher, tmp_path: Path) -> None:
    record = Record({"model": "m"}, attempt=1, port=0, gpus=None)
    teacher = TeacherProcess("key", RunDirectory(tmp_path), record, used_at=0.0, is_running=True)
    eventually(lambda: "%" in read_stage(loading.log))
    teacher.stage = read_stage(loading.log)
    phase_pattern = (
        r"WAITING teacher\.model: the teacher has been loading since .*, reading its weights: \d\d%"
    )
    assert re.fullmatch(phase_pattern, teacher.phase())
