"""The command distill-rollouts: ready line, one-sentence errors, and clean shutdown."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.extras import version
from tests.forked_python import run_forked
from tests.student_trainer.rollout_service.conftest import StartService


def run_command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "student_trainer.rollout_service", "--port", "0", *args]
    return run_forked(command, timeout=60)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--model", "/no/such/directory"], "--model"),
        (["--model", "x", "--engine", "vllm", "--device", "cpu"], "--device"),
        (["--model", "x", "--engine", "vlm"], "--engine"),
        (["--model", "x", "--dtype", "float16"], "--dtype"),
        (["--model", "x", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--model", "x", "--max-batch-tokens", "9"], "--max-batch-tokens"),
        (["--model", "x", "--sleep"], "--sleep"),
        (["--model", "x", "--engine", "vllm", "--sleep"], "--sleep"),  # without a GPU
        (["--model", "x", "--host", "0.0.0.0"], "--host"),
        (["--model", "x", "--tls-key", "/no/key"], "--tls-cert"),
        (["--model", "x", "--token-file", "/no/file"], "--token-file"),
    ],
)
def test_a_wrong_setting_is_one_sentence(args: list[str], field: str) -> None:
    completed = run_command(*args)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert completed.stderr.startswith(f"error: {field}: ")
    assert completed.stderr.count("\n") == 1


def test_the_vllm_engine_without_vllm_is_one_sentence() -> None:
    completed = run_command("--model", "x", "--engine", "vllm")
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: --engine: vllm is not installed; ")


def test_the_version_and_the_help() -> None:
    assert run_command("--version").stdout == f"distill-service {version()}\n"
    help_text = run_command("--help").stdout
    assert "--gpu-memory-share" in help_text
    assert "50053" in help_text


def test_a_taken_port(start_service: StartService) -> None:
    service = start_service()
    # The port is checked before the model is loaded.
    completed = run_command("--model", "/no/such/model", "--port", str(service.port))
    assert completed.returncode == 2
    assert f"port {service.port} is taken" in completed.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_is_stopped(start_service: StartService, signum: signal.Signals) -> None:
    service = start_service("--log-format", "json")
    with grpc.insecure_channel(service.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="distill.v1.Rollouts")
        )
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        service.send(signum)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert service.process.wait(30) == 0
    assert '"event": "serving", "engine": "hf"' in service.log.read_text()


def test_a_service_in_a_log_of_text(start_service: StartService, tmp_path: Path) -> None:
    service = start_service()
    assert " INFO serving engine=hf model=" in service.log.read_text()
