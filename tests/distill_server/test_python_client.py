"""The Python client at a real server: jobs in Python, copies in other processes, the event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from clients import AsyncDistillClient, DistillClient, JobHandle, JobState, load_job, sweep_job
from clients.jobs.job import TERMINAL
from clients.jobs.upload import UploadProgress
from clients.local.directory import reopen_run
from protos.errors import InvalidInput, NotFound, WrongState
from tests.distill_server.conftest import Server, job_config
from tests.documents import blocks


def make_tables(**changes: Any) -> dict[str, Any]:
    return {
        "student": {"model": "tiny"},
        "data": {"path": "train.jsonl"},
        "max_steps": 2,
        "name": "x",
        **changes,
    }


def path_of(job: JobHandle) -> str:
    return str(json.loads(job.refresh().config_json)["data"]["path"])


def test_jobs_in_python(
    server: Server, client: DistillClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "train.jsonl"
    local.write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    tables = make_tables()
    assert path_of(client.submit(tables)) == str(local)
    assert path_of(client.submit(load_job(tables).config)) == str(local)
    client.check(tables, load_job(tables))
    uploaded = Path(path_of(client.submit(tables, upload=True)))
    assert uploaded.is_relative_to(server.runs)
    assert uploaded.read_bytes() == local.read_bytes()
    assert path_of(client.submit(make_tables(data={"path": "other.jsonl"}))) == "other.jsonl"
    with pytest.raises(InvalidInput, match=r"no such file|data.path"):
        client.submit(make_tables(data={"path": "other.jsonl"}), upload=True)
    jobs = client.submit_all(sweep_job(tables, [{"seed": 1}, {"seed": 2}]), upload=True)
    assert [job.labels["seed"] for job in jobs] == ["1", "2"]
    assert {path_of(job) for job in jobs} == {str(uploaded)}
    (single,) = client.submit_all([tables], idempotency_key="k")
    assert client.submit(tables, idempotency_key="k") == single
    with pytest.raises(WrongState, match=f"is a job of a job server.* distill resume {single.id}"):
        reopen_run(server.runs / single.id, None)  # as `distill run --resume`
    file = tmp_path / "job.toml"
    file.write_text('# mine\nstudent.model = "tiny"\ndata.path = "train.jsonl"\nmax_steps = 2\n')
    job = client.submit(load_job(file))
    assert (server.runs / job.id / "job.toml").read_text() == file.read_text()
    (block,) = blocks("docs/python.md", "job")
    exec(block.body.replace("localhost:50051", server.address), {})
    assert [job.max_steps for job in client.list(limit=3)] == [100, 100, 50]
    before = len(client.list())
    for wrong in (
        make_tables(max_step=1),
        load_job(tables).config.model_copy(update={"seed": "x"}),
    ):
        for call in (client.submit, client.check, lambda job: client.submit_all([job])):
            with pytest.raises(InvalidInput, match=r"max_step: unknown key|seed: must be a valid"):
                call(wrong)
    assert len(client.list()) == before


def test_copies_connect_again(
    client: DistillClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit(job_config("x", max_steps=2))
    monkeypatch.setenv("DISTILL_TOKEN", "secret" * 10)
    with DistillClient(server.address) as with_token:
        assert b"secret" not in pickle.dumps(with_token)
    monkeypatch.delenv("DISTILL_TOKEN")
    copied = pickle.loads(pickle.dumps([job, job]))
    assert copied == [job, job]
    assert copied[0].client is copied[1].client
    assert copied[0].wait(60).state is JobState.SUCCEEDED
    copied[0].client.close()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(job.refresh).result(60).state is JobState.SUCCEEDED
        assert pool.submit(client.get, job.id).result(60).id == job.id


def test_a_cancelled_submission_queues_nothing(
    server: Server, client: DistillClient, tmp_path: Path
) -> None:
    """Cancelled during the upload, whose thread then ends."""
    local = tmp_path / "train.jsonl"
    line = json.dumps({"prompt": "a" * 1000, "answer": "b"}) + "\n"
    local.write_text(line * 4000)
    has_begun, is_cancelled = threading.Event(), threading.Event()
    progress: list[UploadProgress] = []

    def report(upload: UploadProgress) -> None:
        progress.append(upload)
        if not upload.begins:
            has_begun.set()
            is_cancelled.wait()

    async def cancel_submission() -> None:
        async with AsyncDistillClient(server.address) as remote:
            tables = make_tables(data={"path": str(local)})
            submission = asyncio.ensure_future(remote.submit(tables, upload=True, report=report))
            await asyncio.to_thread(has_begun.wait)
            submission.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submission
        is_cancelled.set()

    asyncio.run(cancel_submission())
    for thread in threading.enumerate():
        if thread.name.startswith("distill-client"):
            thread.join()
    assert client.list() == []
    assert progress[-1].sent_bytes < progress[-1].size


def test_the_client_of_an_event_loop(make_server: Callable[..., Server]) -> None:
    server = make_server(slots=2)

    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AsyncDistillClient) == public(DistillClient)
    assert inspect.signature(AsyncDistillClient.submit) == inspect.signature(DistillClient.submit)

    async def use_client() -> None:
        async with AsyncDistillClient(server.address) as remote:
            slow = await remote.submit(job_config("pause=0.2", max_steps=100_000))
            # More calls than the threads of a default executor, and none delays the others.
            waits = [asyncio.ensure_future(remote.wait(slow.id)) for _ in range(40)]
            jobs = await asyncio.gather(
                *(remote.submit(job_config(f"x{n}", max_steps=3)) for n in range(2))
            )
            steps = [event.step async for event in remote.watch(jobs[0].id) if event.metrics]
            assert steps == [1, 2, 3]
            assert (await remote.wait(jobs[1].id, timeout=60)).state is JobState.SUCCEEDED
            chunks = [chunk async for chunk in remote.logs(jobs[0].id)]
            assert b"step 3" in b"".join(chunks)
            listed = await remote.list(limit=2)
            assert (len(listed), listed[0].refresh().id) == (2, listed[0].id)
            with pytest.raises(NotFound):
                await remote.get("nothing")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(remote.wait(slow.id), 0.2)
            async for _ in remote.watch(slow.id):
                break
            assert not any(wait.done() for wait in waits)
            await remote.cancel(slow.id, now=True)
            assert {job.state for job in await asyncio.gather(*waits)} <= TERMINAL
            assert pickle.loads(pickle.dumps(remote)) is not remote

    asyncio.run(use_client())
