"""Processes on several machines connect, and distinguish a lost process from their own errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import OutOfMemoryError
from torch.distributed import DistNetworkError

from clients.runs.directory import Verdict
from protos.errors import InvalidInput
from protos.rpc.ports import free_ports
from student_trainer.__main__ import _explain_errors
from student_trainer.parallel.collectives import is_lost_process_error, select_interface
from tests.namespaces import namespace

ROOT = Path(__file__).parents[3]
# Both machines resolve their own name to the loopback, which gloo would announce by default.
PROGRAM = """
from datetime import timedelta
from student_trainer.parallel.collectives import max_over_ranks, make_accelerator
accelerator = make_accelerator(timedelta(seconds=30))
print(max_over_ranks(accelerator, 5 + accelerator.process_index))
"""


def test_two_machines_meet() -> None:
    (port,) = free_ports(1)
    with namespace() as machine:
        processes = []
        for rank, prefix in enumerate([[], machine.command()]):
            places = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
            group = {"MASTER_ADDR": machine.here, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = {name: str(value) for name, value in (places | group).items()}
            processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, "-c", PROGRAM],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | environment,
                )
            )
        try:
            for process in processes:
                output, errors = process.communicate(timeout=120)
                assert output == "6\n", errors
        finally:
            for process in processes:
                process.kill()
                process.wait(20)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "chosen",
        },
    ],
)
def test_one_machine_and_a_chosen_interface_stay(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    select_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == variables.get("GLOO_SOCKET_IFNAME")


def test_only_a_lost_process_is_no_verdict() -> None:
    assert is_lost_process_error(DistNetworkError("the client socket has failed"))
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
    assert is_lost_process_error(RuntimeError(place))
    assert not is_lost_process_error(RuntimeError("shapes differ"))
    assert not is_lost_process_error(OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("place", ["GPU", "host"])
def test_too_little_memory_names_the_key_that_helps(place: str) -> None:
    def attempt() -> Verdict:
        if place == "GPU":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        torch.empty(1 << 60)
        return "succeeded"

    with pytest.raises(InvalidInput, match="not enough memory: ") as caught:
        _explain_errors(attempt)
    assert caught.value.field == "train.tokens_per_micro_batch"
    assert "distill plan" in caught.value.hint
