"""S4: no text from a client or a server becomes a path outside the expected directory."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig
from clients.jobs.download import Download
from clients.jobs.job import JobState
from clients.runs.directory import RunDirectory
from clients.store.manifest import SCHEMA_VERSION
from clients.store.store import LogitStore
from distill_server.jobs.change_notifier import ChangeNotifier
from distill_server.jobs.control import JobControl
from distill_server.jobs.database import open_database
from distill_server.jobs.run_files import RunFiles
from distill_server.jobs.store import Change, JobStore
from distill_server.retention.removals import Removals
from distill_server.rpc.artifacts import read_pieces
from distill_server.rpc.service import DistillService
from distill_server.rpc.streams import Streams
from protos import distill_pb2 as pb
from protos.errors import DistillError

SECRET = b"what nobody may read"
CASES = 10_000
PIECES = (
    *("../", "..", "/", "/etc/passwd", "..\\", "\\..\\", "%2e%2e/", "%252e%252e%252f", "./", "//"),
    *("\0", "a" * 4096, "\uff0e\uff0e/", "\u2024\u2024/", "~", "~root", "$HOME", "*", "-", "--x"),
    *("file:///", "C:\\", "@last", "\n", "\udcff", "..;/", "secret", "outside", "export", "link"),
)
_watched_paths: list[str] | None = None
_PATH_EVENTS = {"open", "shutil.rmtree"}


def _record_paths(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: records every path that is opened, listed, created, renamed or removed."""
    if _watched_paths is None or not (event in _PATH_EVENTS or event.startswith("os.")):
        return
    for argument in arguments:
        if isinstance(argument, str | bytes):
            _watched_paths.append(os.fsdecode(argument))


@contextlib.contextmanager
def watch_paths() -> Iterator[list[str]]:
    """Yield the list of paths touched inside. All tests share one hook: it cannot be removed."""
    global _watched_paths
    if not getattr(sys, "_distill_hook", False):
        sys.addaudithook(_record_paths)
        sys._distill_hook = True  # type: ignore[attr-defined]
    _watched_paths = []
    try:
        yield _watched_paths
    finally:
        _watched_paths = None


def paths_outside(touched: list[str], root: Path) -> set[str]:
    # Audit events also have the mode of `open`, which has no slash. Python opens its modules.
    python_prefixes = ("/proc/self/", sys.prefix, sys.base_prefix)
    paths = {path for path in touched if "/" in path and not path.startswith(python_prefixes)}
    return {path for path in paths if not Path(os.path.realpath(path)).is_relative_to(root)}


def hostile_name(order: random.Random, job_id: str) -> str:
    pieces = order.choices((*PIECES, job_id, job_id[:9]), k=order.randint(1, 5))
    text = "".join(pieces)
    # Protobuf strings and command lines must be UTF-8.
    return text.replace("\udcff", "")


@pytest.fixture
def base_directory(tmp_path: Path) -> Path:
    """A directory with `runs`, and secret files beside it."""
    (tmp_path / "runs").mkdir()
    for name in ("outside/export/secret", "export/secret", "secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(SECRET)
    return tmp_path


def modification_times(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


class _Context:
    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "test"


async def read_answer(answer: Any) -> bytes:
    """Return all bytes that a unary or streaming method answers."""
    if hasattr(answer, "__aiter__"):
        messages = [message async for message in answer]
    else:
        messages = [await answer]
    return b"".join(message.SerializeToString() for message in messages)


def random_request(order: random.Random, service: DistillService, job_id: str) -> Callable[[], Any]:
    """Return a random call in which every argument is hostile."""
    text, number = hostile_name(order, job_id), order.choice((0, 1, 7, 2**31, 2**63))
    context: Any = _Context()
    return order.choice(
        (
            lambda: service.GetJob(pb.GetJobRequest(job_id=text), context),
            lambda: service.ListJobs(pb.ListJobsRequest(before_id=text, limit=3), context),
            lambda: service.WatchJob(pb.WatchJobRequest(job_id=text), context),
            lambda: service.StreamLogs(
                pb.StreamLogsRequest(
                    job_id=text, attempt=number % 2**32, after_offset=number, tail_lines=number % 9
                ),
                context,
            ),
            lambda: service.CancelJob(pb.CancelJobRequest(job_id=text), context),
            lambda: service.ResumeJob(
                pb.ResumeJobRequest(job_id=text, max_steps=number, from_step=number), context
            ),
            lambda: service.GetArtifact(
                pb.GetArtifactRequest(job_id=text, checkpoint_step=number), context
            ),
        )
    )


def test_what_clients_send_never_leaves_the_runs(base_directory: Path) -> None:
    runs = (base_directory / "runs").resolve()
    times_before = modification_times(base_directory / "outside") | modification_times(
        base_directory / "export"
    )
    order = random.Random(0)
    with open_database(base_directory / "server.sqlite") as connection:
        store = JobStore(connection, on_change=lambda job_id: None)
        control = JobControl(store, runs, wake=lambda: None)
        removals = Removals(connection, store, runs, RunFiles(), lambda job_id: None)
        streams = Streams(store, runs, ChangeNotifier())
        service = DistillService(store, runs, control, streams, removals)
        job_id = _finish_job(control, store, runs)
        refused_calls, answered_calls, touched = asyncio.run(_fuzz(service, order, job_id))
    print(
        f"\n{CASES} calls: {refused_calls} refused, {answered_calls} answered,"
        f" {len(touched)} paths touched"
    )
    assert refused_calls > CASES // 2
    assert answered_calls > 0
    assert len(touched) > 100
    assert paths_outside(touched, runs) == set()
    assert (
        modification_times(base_directory / "outside")
        | modification_times(base_directory / "export")
        == times_before
    )


def _finish_job(control: JobControl, store: JobStore, runs: Path) -> str:
    """Submit a job, write its export and its log, and mark it as succeeded; return its id."""
    config = OnPolicyJob(student=StudentConfig(model="m"), data=DataConfig(path="p"), max_steps=1)
    job = control.submit(config.model_dump_json(), "", "")
    run_directory = RunDirectory(runs / job.id)
    (run_directory.export / "deep").mkdir(parents=True)
    (run_directory.export / "deep" / "weights").write_bytes(b"weights")
    run_directory.logs(1).mkdir(parents=True)
    run_directory.log_file(1).write_text("log\n")
    for state in (JobState.PREPARING, JobState.RUNNING, JobState.SUCCEEDED):
        store.change(job.id, Change(state))
    return job.id


async def _fuzz(
    service: DistillService, order: random.Random, job_id: str
) -> tuple[int, int, list[str]]:
    refused_count = answered_count = 0
    with watch_paths() as touched:
        for _ in range(CASES):
            try:
                answer = await read_answer(random_request(order, service, job_id)())
                answered_count += 1
            except DistillError as error:
                answer = str(error).encode(errors="replace")
                refused_count += 1
            assert SECRET not in answer
    return refused_count, answered_count, touched


def test_names_of_jobs_become_names_of_directories(base_directory: Path) -> None:
    runs = (base_directory / "runs").resolve()
    order = random.Random(1)
    with open_database(base_directory / "server.sqlite") as connection, watch_paths() as touched:
        control = JobControl(
            JobStore(connection, on_change=lambda _: None), runs, wake=lambda: None
        )
        job_ids = []
        for number in range(200):
            name = hostile_name(order, "x")[:200] or "x"
            config = OnPolicyJob(
                student=StudentConfig(model="m"), data=DataConfig(path="p"), name=name
            )
            text = hostile_name(order, "x")
            job_ids.append(
                control.submit(config.model_dump_json(), text, f"{number}{text}"[:200]).id
            )
    assert paths_outside(touched, runs) == set()
    assert {path.name for path in runs.iterdir()} == set(job_ids)
    assert len(set(job_ids)) == 200
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in job_ids)
    assert sorted(path.name for path in base_directory.iterdir()) == [
        *("export", "outside", "runs", "secret", "server.lock", "server.sqlite"),
    ]


def test_what_a_server_sends_never_leaves_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # 10,000 calls of fsync would take a minute
    order = random.Random(2)
    digest = hashlib.sha256(b"x").hexdigest()
    outcomes = {"refused": 0, "written": 0}
    with Download(tmp_path / "target") as download, watch_paths() as touched:
        for _ in range(CASES):
            path = hostile_name(order, "export")
            chunk = pb.ArtifactChunk(path=path, data=b"x", last=True, sha256=digest)
            try:
                download.add(chunk)
                outcomes["written"] += 1
            except (DistillError, OSError):
                outcomes["refused"] += 1
    print(f"\n{CASES} paths of a server: {outcomes}")
    assert min(outcomes.values()) > 100
    assert paths_outside(touched, tmp_path.resolve()) == set()
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_followed_even_when_they_appear_meanwhile(base_directory: Path) -> None:
    """A thread keeps replacing a directory of an artifact by a link to the secret."""
    root = base_directory / "runs" / "job" / "export"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "secret").write_bytes(b"harmless")
    real, link = root.with_name("real"), root.with_name("link")
    link.symlink_to(base_directory / "outside" / "export")
    stop = threading.Event()

    def swap_links() -> None:
        while not stop.is_set():
            (root / "sub").rename(real)
            link.rename(root / "sub")
            (root / "sub").rename(link)
            real.rename(root / "sub")

    async def pull_once() -> bytes:
        try:
            return b"".join([piece.data async for piece in read_pieces(root)])
        except DistillError as error:
            return type(error).__name__.encode()

    async def count_outcomes() -> collections.Counter[bytes]:
        outcomes: collections.Counter[bytes] = collections.Counter()
        deadline = time.monotonic() + 240
        while (
            min(outcomes[b"harmless"], outcomes[b"WrongState"]) < 100
            and time.monotonic() < deadline
        ):
            outcomes[await pull_once()] += 1
        return outcomes

    thread = threading.Thread(target=swap_links)
    thread.start()
    try:
        outcomes = asyncio.run(count_outcomes())
    finally:
        stop.set()
        thread.join()
    print(f"\n{dict(outcomes)}")
    assert min(outcomes[b"harmless"], outcomes[b"WrongState"]) >= 100
    assert SECRET not in b"".join(outcomes)


def test_a_manifest_names_no_file_of_others(tmp_path: Path) -> None:
    """A cache directory with a hostile manifest."""
    victim = tmp_path / "victim.arrow"
    victim.write_bytes(SECRET)
    cache = tmp_path / "cache"
    for name in ("../victim.arrow", str(victim), "00000000.arrow/../../victim.arrow"):
        cache.mkdir(exist_ok=True)
        shard = f'{{"name": "{name}", "count": 1, "bytes": {len(SECRET)}, "sha256": ""}}'
        (cache / "manifest.json").write_text(
            f'{{"schema_version": {SCHEMA_VERSION}, "metadata": {{}}, "shards": [{shard}]}}'
        )
        with (
            watch_paths() as touched,
            contextlib.suppress(DistillError),
            LogitStore(cache, write=True) as store,
        ):
            assert len(store) == 0
        assert paths_outside(touched, cache.resolve()) == set()
        assert victim.read_bytes() == SECRET
        (cache / "manifest.json").unlink()
