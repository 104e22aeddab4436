"""Runs vLLM's own HTTP server, as somebody else would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from protos.rpc.ports import free_ports

NAME = "somebody-elses"
KEY = "a key of the endpoint"
MAX_LOGPROBS = 40


@contextmanager
def vllm_server(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve `model` with vLLM's HTTP interface on the CPU; yields its address."""
    [port] = free_ports(1)
    command = [
        # `vllm serve` wants the package's metadata under the name vllm, which CPU builds lack.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME),
        *("--api-key", KEY, "--dtype", "float32", "--enforce-eager"),
        *("--max-logprobs", str(MAX_LOGPROBS), *options),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # It needs Triton.
        "VLLM_USE_V2_MODEL_RUNNER": str(int(torch.cuda.is_available())),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command, env=environment, stdout=messages, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while not _is_up(address):
            assert process.poll() is None, log.read_text()
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
