"""Clients in child processes: forked children refuse each call at once, spawned ones connect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.teacher.test_client import fake_engine_options
from tests.teacher_service.conftest import StartTeacher

ROOT = Path(__file__).parents[3]
# ADDRESS. A call in the child has no time-out of its own if it blocks: hence `get`'s.
FORKED_CLIENTS = """
import multiprocessing, pickle, sys
from clients import AsyncTeacherClient, DistillClient, DistillError, ScoreQuery, TeacherClient

address = sys.argv[1]
query = ScoreQuery(__import__("numpy").array([1, 2], "int32"), start=1, top_k=1)


def make_and_call(kind):
    try:
        with kind(address) as client:
            return client.list() if kind is DistillClient else client.info().model
    except DistillError as error:
        return type(error).__name__, str(error)


def call_inherited(name):
    try:
        return getattr(teacher, name)(*[query][: name == "submit"])
    except DistillError as error:
        return type(error).__name__, str(error)


def call_server(name):
    try:
        return getattr(server, name)(*["x"][: name != "list"])
    except DistillError as error:
        return type(error).__name__, str(error)


def leave(name):
    with teacher, server:
        pass
    return "left"


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool:  # before the first client of the parent
        print(pool.apply_async(make_and_call, [TeacherClient]).get(60))
    teacher, server = TeacherClient(address), DistillClient(address)
    model = teacher.info().model
    results = []
    with fork.Pool(2) as pool:
        for call, names in (
            (make_and_call, (TeacherClient, DistillClient)),
            (call_inherited, ("info", "load", "vocabulary", "submit")),
            (call_server, ("list", "get", "wait")),
        ):
            results += pool.map_async(call, names).get(60)
        assert set(results) == {results[0]}, results
        print(*results[0])
        print(pool.apply_async(leave, [0]).get(60))
    assert teacher.info().model == model
    assert teacher.score([query])[0].token_logprobs.size == 1
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        print(pool.apply_async(teacher.info).get(60).model)
        print(pool.apply_async(pickle.dumps, [AsyncTeacherClient(address)]).get(60)[:1])

    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return teacher.score([query])[0].token_logprobs.tolist()

    from torch.utils.data import DataLoader
    try:
        list(DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))
    except DistillError as error:
        print(str(error).splitlines()[-1])
    assert teacher.info().model == model
    teacher.close()
"""


def test_clients_in_children(start_teacher: StartTeacher, tmp_path: Path) -> None:
    """Each call of a forked child is refused at once; spawned children connect again."""
    program = tmp_path / "program.py"
    program.write_text(FORKED_CLIENTS)
    address = start_teacher(*fake_engine_options()).address
    command = [sys.executable, str(program), address]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, refusal, left, model, _, loaded = process.stdout.splitlines()
    assert first == model
    assert refusal.startswith("WrongState this process was forked from a process with connections")
    assert "method 'spawn'" in refusal
    assert left == "left"
    assert "this process was forked from a process with connections" in loaded
