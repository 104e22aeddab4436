"""A program that uses gRPC can fork: its children print nothing about gRPC and do not die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORKS = 60
# Any `preexec_fn` makes Python fork instead of using posix_spawn.
PROGRAM = f"""
import subprocess
from clients.jobs.client import DistillClient
import grpc
from concurrent.futures import ThreadPoolExecutor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
    check = health_pb2_grpc.HealthStub(channel).Check
    for _ in range({FORKS}):
        check(health_pb2.HealthCheckRequest())
        subprocess.run(["true"], preexec_fn=int, check=True)
server.stop(0)
"""


# Fails if gRPC is imported before its fork support is disabled.
WATCHED = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print("grpc")
            assert os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == "0", "imported too early"

sys.meta_path.insert(0, Watch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ["clients.cli.app", "clients.jobs.client"],
        ["clients.teacher.client"],
        ["distill_server.command", "distill_server.server"],
        ["teacher_service.command", "teacher_service.program"],
        ["student_trainer.__main__"],
    ],
    ids=lambda modules: modules[0],
)
def test_grpc_is_told_before_it_is_imported(modules: list[str]) -> None:
    command = [sys.executable, "-c", WATCHED, *modules]
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "grpc\n"


def test_children_of_a_program_with_connections_are_left_alone() -> None:
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
