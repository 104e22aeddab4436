"""`distill eval` against vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.config.evaluation import ExamConfig
from clients.config.tables.data import DataConfig
from clients.config.tables.reward import RewardConfig
from protos.rpc.ports import free_ports
from student_trainer.exam.__main__ import run
from tests.vllm.model import save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]
PROMPTS, SAMPLES = 8, 64
PATTERN = "^[\u0020-\u00a0]"  # about a quarter of what a flat distribution begins with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{number} plus {number}", "answer": ""}) for number in range(8)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("vllm") / "log"
    # `vllm serve` wants the package's metadata under the name vllm, which a build for CPUs lacks.
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "16"),
        "--enforce-eager",
    ]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while not is_healthy(port):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def completed(endpoint: str) -> int:
    """Requests that vLLM says it has finished."""
    with urllib.request.urlopen(endpoint.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(COUNTER)]
    return round(sum(map(float, counts)))


COUNTER = "vllm:request_success_total{"


def exam(data: Path, out: Path, **changes: Any) -> ExamConfig:
    values: dict[str, Any] = {
        "models": {"tiny": "tiny"},
        "out": str(out),
        "reward": RewardConfig(type="regex", pattern=PATTERN),
        "data": DataConfig(path=str(data)),
        "method": {
            "type": "eval",
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "temperature": 2.0,  # the most that vLLM takes: the logits are far apart
            "max_new_tokens": 2,
        },
        "seed": 0,
        "endpoint": None,
        "api": "completions",
        "in_flight": 16,
        "patience_seconds": 600.0,
    }
    return ExamConfig(**{**values, **changes})


def test_scores_are_those_of_the_directory(
    model: Path, data: Path, endpoint: str, tmp_path: Path
) -> None:
    directory = {"models": {"tiny": str(model)}}
    before = completed(endpoint)
    (served,) = run(exam(data, tmp_path / "served", endpoint=endpoint))
    assert completed(endpoint) - before == PROMPTS * SAMPLES
    (local,) = run(exam(data, tmp_path / "local", **directory))
    share = local["pass@1"]["mean"]
    assert 0.02 < share < 0.98
    error = math.sqrt(2 * share * (1 - share) / (PROMPTS * SAMPLES))
    print(f"served {served['pass@1']}, local {local['pass@1']}")
    assert abs(served["pass@1"]["mean"] - share) < 4 * error
    assert served["tokens"] == local["tokens"] == {"mean": 2.0, "low": 2.0, "high": 2.0}


def test_killed_and_gone_on_with(data: Path, endpoint: str, tmp_path: Path) -> None:
    """kill -9: as many requests as answers, but for those in flight when it came."""
    in_flight = 4
    before = completed(endpoint)
    command = [
        *(sys.executable, "-m", "clients", "-q", "--json", "eval", "tiny"),
        *("--endpoint", endpoint, "--api", "completions", "--in-flight", str(in_flight)),
        *("--data", str(data), "--reward", "regex", "--set", f"reward.pattern='{PATTERN}'"),
        *("--samples", str(SAMPLES), "--max-tokens", "2", "--out", str(tmp_path)),
    ]
    first = subprocess.Popen(command)
    journal = tmp_path / "tiny" / "answers.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 100):
        assert first.poll() is None, "it was done before it was killed"
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.wait()
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(process.stdout)["models"]
    assert (row["prompts"], row["samples"]) == (PROMPTS, SAMPLES)
    again = completed(endpoint) - before - PROMPTS * SAMPLES
    assert 0 <= again <= in_flight
