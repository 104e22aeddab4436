"""Reads of run directories for the dashboard are shared, bounded and time out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clients.runs.directory import RunDirectory
from distill_server.dashboard import job_details
from distill_server.dashboard.job_details import checkpoints_of
from distill_server.jobs.run_files import RunFiles, SharedReads
from protos.errors import Unavailable
from tests.distill_server.conftest import eventually
from tests.distill_server.dashboard.site import Site


def test_many_viewers_are_one_read() -> None:
    async def read_twice() -> None:
        shared_reads, reads = SharedReads(RunFiles()), []
        pending_reads = [
            shared_reads.read(("a",), lambda: reads.append(1) or len(reads)) for _ in range(9)
        ]
        assert await asyncio.gather(*pending_reads) == [1] * 9
        assert await shared_reads.read(("b",), lambda: "other") == "other"
        assert reads == [1]

    asyncio.run(read_twice())


def test_a_read_that_hangs_keeps_one_thread() -> None:
    answers, calls = threading.Event(), []

    def read() -> int:
        calls.append(1)
        answers.wait(60)
        return 7

    async def read_twice() -> None:
        shared_reads = SharedReads(RunFiles(answer_seconds=0.05))
        for _ in range(3):
            with pytest.raises(Unavailable, match="has not answered"):
                await shared_reads.read(("a",), read)
        answers.set()
        assert await shared_reads.read(("a",), read) == 7
        assert calls == [1]

    asyncio.run(read_twice())


def test_checkpoints_are_sized_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    assert checkpoints_of(run) == []
    for step in range(5, 505, 5):
        (run.checkpoint(step) / "model").mkdir(parents=True)
        (run.checkpoint(step) / "model" / "weights.bin").write_bytes(bytes(step))
        (run.checkpoint(step) / "state.bin").write_bytes(b"123")
    (run.checkpoints / ".step-000510.tmp").mkdir()
    (run.checkpoints / "latest").symlink_to("step-000500")
    (run.checkpoint(500) / "link").symlink_to("/proc/kcore")
    link = (run.checkpoint(500) / "link").lstat().st_size
    sizes = {checkpoint["step"]: checkpoint["bytes"] for checkpoint in checkpoints_of(run)}
    assert sizes == {step: step + 3 for step in range(5, 500, 5)} | {500: 503 + link}
    run.checkpoint(505).mkdir()
    assert [checkpoint["step"] for checkpoint in checkpoints_of(run)] == [*range(505, 5, -5)]
    monkeypatch.setattr(job_details, "_MAX_FILES", 1)
    assert checkpoints_of(run)[-1]["bytes"] in (3, 10)


def test_a_running_job_tells_its_processes_and_checkpoints(site: Site) -> None:
    job = site.submit(name="pause=0.05 every=2 orphan=1", max_steps=1000)
    eventually(lambda: site.job(job)["step"] >= 6)
    path = f"/api/jobs/{job}"
    trainers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(site.runs / job) in (line := process.info["cmdline"] or []) and line[1] == "-S"
    ]
    assert len(trainers) == 1
    usage = site.ask(f"{path}/usage").json()["usage"]
    assert usage["processes"] == 2  # the trainer and its orphan in another session
    rss = sum(process.memory_info().rss for process in [*trainers, *trainers[0].children()])
    assert usage["memory_bytes"] == pytest.approx(rss, rel=0.1)
    assert usage["cpus"] == psutil.cpu_count()
    assert usage["machine_memory"] == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    cpu_seconds = usage["cpu_seconds"]
    times = trainers[0].cpu_times()
    assert 0 < cpu_seconds <= sum(times[:4]) + 0.5
    checkpoint_records = site.ask(f"{path}/checkpoints").json()["checkpoints"]
    assert [
        (checkpoint["step"], checkpoint["bytes"]) for checkpoint in checkpoint_records[-3:]
    ] == [(6, 1000), (4, 1000), (2, 1000)]
    (attempt,) = site.ask(f"{path}/attempts").json()["attempts"]
    assert (attempt["attempt"], attempt["end"], attempt["ended_at"]) == (1, "", 0)
    ended_id = site.submit(max_steps=1)
    eventually(lambda: site.job(ended_id)["state"] == "SUCCEEDED")
    assert site.ask(f"/api/jobs/{ended_id}/usage").json() == {"usage": None}


def test_a_run_directory_that_is_gone_is_no_error(make_site: Callable[..., Site]) -> None:
    site = make_site()
    job = site.submit(max_steps=1)
    eventually(lambda: site.job(job)["state"] == "SUCCEEDED")
    (site.runs / job).rename(site.runs.with_name("moved"))
    assert site.ask(f"/api/jobs/{job}/checkpoints").json() == {"checkpoints": []}
    assert site.ask(f"/api/jobs/{job}/usage").json() == {"usage": None}
