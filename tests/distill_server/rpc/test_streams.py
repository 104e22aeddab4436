"""Logs, artifacts, and an unreachable server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.jobs.artifacts import Checkpoint, checkpoint_step, pull_run
from clients.jobs.client import DistillClient, JobHandle
from clients.jobs.job import JobState
from clients.jobs.record import record_of_run
from clients.runs.directory import RunDirectory
from distill_server.rpc.streams import _tail_offset
from distill_server.runners.local.process import family
from protos.errors import InvalidInput, NotFound, TimedOut, Unavailable, WrongState
from tests.distill_server.conftest import Server, eventually, job_config
from tests.faults.proxy import FaultProxy, Toxics


def test_log_of_a_finished_job(server: Server, client: DistillClient) -> None:
    job = client.submit(job_config(max_steps=4))
    client.wait(job.id, timeout=20)
    log = b"".join(client.logs(job.id))
    assert log == b"attempt 1 starts after step 0\nstep 1\nstep 2\nstep 3\nstep 4\n"
    assert b"".join(client.logs(job.id, tail_lines=2)) == b"step 3\nstep 4\n"
    assert b"".join(client.logs(job.id, tail_lines=99, follow=True)) == log
    with pytest.raises(NotFound, match="newest attempt is 1"):
        list(client.logs(job.id, attempt=2))


def test_files_of_a_job_that_were_removed(server: Server, client: DistillClient) -> None:
    blocker = client.submit(job_config("pause=1", max_steps=1000))
    job = client.submit(job_config(max_steps=4))
    shutil.rmtree(server.runs / job.id)
    with pytest.raises(NotFound, match=r"run directory .* was removed"):
        list(client.logs(job.id))
    client.cancel(blocker.id, now=True)
    # The directory had nothing that the database lacks.
    assert client.wait(job.id, timeout=20).state is JobState.SUCCEEDED
    shutil.rmtree(server.runs / job.id)
    with pytest.raises(NotFound, match=r"run directory .* was removed"):
        client.resume(job.id, max_steps=8)


def test_a_running_job_whose_files_were_removed_can_be_cancelled(
    server: Server, client: DistillClient
) -> None:
    job = client.submit(job_config("hang_at=2 deaf=1", max_steps=9))
    eventually(lambda: client.get(job.id).step == 1)
    card = server.card(job.id)
    shutil.rmtree(server.runs / job.id)
    client.cancel(job.id)
    assert client.wait(job.id, timeout=30).state is JobState.CANCELLED
    assert family(str(card["mark"])) == []


def test_log_is_followed_through_a_restart(server: Server, client: DistillClient) -> None:
    """Followed from before the first attempt starts until its end; no byte is lost or doubled."""
    first_job = client.submit(job_config("pause=0.2", max_steps=2))
    job = client.submit(job_config("pause=0.03", max_steps=40))
    chunks: list[bytes] = []
    thread = threading.Thread(target=lambda: chunks.extend(client.logs(job.id, follow=True)))
    thread.start()
    eventually(lambda: b"step 3" in b"".join(chunks))
    server.kill()
    server.start()
    thread.join(30)
    assert not thread.is_alive()
    expected = "attempt 1 starts after step 0\n" + "".join(f"step {n}\n" for n in range(1, 41))
    assert b"".join(chunks).decode() == expected
    assert client.get(first_job.id).state is JobState.SUCCEEDED


def test_logs_of_attempts(client: DistillClient) -> None:
    job = client.submit(job_config("crash_at=3 crashes=1", max_steps=4))
    followed = b"".join(client.logs(job.id, attempt=1, follow=True))
    assert followed.endswith(b"step 2\nabout to crash\n")
    client.wait(job.id, timeout=20)
    assert b"".join(client.logs(job.id)).startswith(b"attempt 2 starts after step 0")
    assert b"".join(client.logs(job.id, attempt=1)) == followed


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"\n\n\n", b"x\n" * 100_000])
@pytest.mark.parametrize("lines", [1, 2, 70_000, 200_000])
def test_tail_offset(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    tail = b"".join(content.splitlines(keepends=True)[-lines:])
    assert content[_tail_offset(path, lines) :] == tail


def test_tail_of_a_log_that_is_one_line(tmp_path: Path) -> None:
    """A progress bar writes one long line: reading every byte would block other calls."""
    path = tmp_path / "log"
    path.write_bytes(b"progress 5%\r" * 8_000_000)
    start_time = time.process_time()
    assert _tail_offset(path, 5) == 0
    assert time.process_time() - start_time < 2


def test_pull(server: Server, client: DistillClient, tmp_path: Path) -> None:
    job = client.submit(job_config(max_steps=5))
    client.wait(job.id, timeout=20)
    export = server.runs / job.id / "export"
    out = client.pull(job.id, tmp_path / "deep" / "out")
    names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert names == ["config.json", "empty.txt", "nested/model.bin"]
    for name in names:
        assert (out / name).read_bytes() == (export / name).read_bytes()
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    with pytest.raises(InvalidInput, match="not an empty directory"):
        client.pull(job.id, out)
    (tmp_path / "empty").mkdir()
    weights = client.pull(job.id, tmp_path / "empty", checkpoint=5) / "weights.bin"
    assert weights.read_bytes() == bytes([5]) * 1000


def test_pull_over_a_connection_that_breaks(
    server: Server, client: DistillClient, tmp_path: Path
) -> None:
    job = client.submit(job_config(max_steps=2))
    assert job.wait(60).state is JobState.SUCCEEDED
    model = server.runs / job.id / "export" / "nested" / "model.bin"
    model.write_bytes(os.urandom(12 << 20))
    with FaultProxy(server.address, Toxics(reset_after_bytes=5 << 20)) as proxy:
        with DistillClient(proxy.address) as remote_client:
            folder = remote_client.pull(job.id, tmp_path / "out")
        assert proxy.resets >= 2
    assert (folder / "nested" / "model.bin").read_bytes() == model.read_bytes()


def test_a_handle_does_what_its_client_does(client: DistillClient, tmp_path: Path) -> None:
    job = client.submit(job_config("hang_at=8 hangs=1 every=5", max_steps=12))
    assert isinstance(job, JobHandle)
    assert asdict(job)["state"] is JobState.QUEUED, "as the command line prints it"
    for event in job.watch(timeout=60):
        if event.step == 7:
            break
    assert job.refresh().step == 7
    assert job.state is JobState.QUEUED, "the values of a handle do not change"
    job.cancel(now=True)
    assert job.wait(60).state is JobState.CANCELLED
    resumed_job = job.resume(max_steps=14).wait(60)
    assert (resumed_job.state, resumed_job.step, resumed_job.attempt) == (JobState.SUCCEEDED, 14, 2)
    assert resumed_job == client.get(job.id)
    assert len(job.history()) == resumed_job.last_seq
    assert b"".join(job.logs(attempt=2)).startswith(b"attempt 2 starts after step 5")
    assert (job.pull(tmp_path / "out") / "config.json").exists()
    assert (job.pull(tmp_path / "five", checkpoint=5) / "weights.bin").exists()


def test_pull_of_a_checkpoint_by_its_evaluation(
    server: Server, client: DistillClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same from the server and the run directory, in Python and on the command line."""
    monkeypatch.chdir(tmp_path)
    job = client.submit(job_config("best=10", max_steps=20))
    assert client.wait(job.id, timeout=20).checkpoints == (5, 10, 15, 20)
    run = server.runs / job.id
    choices: tuple[tuple[Checkpoint, int], ...] = (("best", 10), ("last", 20))
    for choice, step in choices:
        weights = bytes([step]) * 1000
        paths = [
            client.pull(job.id, f"client-{choice}", checkpoint=choice),
            pull_run(run, f"run-{choice}", checkpoint=choice),
        ]
        for source in (job.id, str(run)):
            out = f"{choice}-{len(source)}"
            options = ["pull", source, "--checkpoint", str(choice), "-o", out]
            assert main(["-q", "--server", server.address, *options]) == 0
            paths.append(tmp_path / out)
        assert [(path / "weights.bin").read_bytes() for path in paths] == [weights] * 4
    exported_model = pull_run(run, "export") / "nested" / "model.bin"
    assert exported_model.read_bytes() == (run / "export" / "nested" / "model.bin").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000010")
    client.pull(job.id, "next", checkpoint="best")  # of two equally good ones, the later
    assert (tmp_path / "next" / "weights.bin").read_bytes() == bytes([15]) * 1000
    for step in (5, 15):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(NotFound, match=r"was evaluated; .*, or one of the steps 20"):
        client.pull(job.id, "none", checkpoint="best")
    with pytest.raises(NotFound, match="no checkpoint of step 5; choose one of 20"):
        pull_run(run, "none", checkpoint=5)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ({5: {"eval/kl": 2.0}, 10: {"eval/kl": 3.0}, 7: {"eval/kl": 0.0}}, 5),
        ({5: {"eval/kl_bound": 2.0}, 10: {"eval/kl_bound": 1.0}}, 10),
        ({5: {"eval/reward": 0.6, "eval/kl": 9.0}, 10: {"eval/reward": 0.5, "eval/kl": 1.0}}, 5),
        ({10: {"eval/kl": 9.0}, 5: {"eval/accuracy": 1.0}}, 10),
        ({5: {"eval/kl": 1.0}, 10: {"eval/kl": 1.0}}, 10),
    ],
)
def test_which_checkpoint_is_the_best(
    evaluations: dict[int, dict[str, float]], best: int, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "run", job_config())
    for step in (5, 10):
        run.checkpoint(step).mkdir(parents=True)
    lines = ({"attempt": 1, "step": step, **metrics} for step, metrics in evaluations.items())
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = record_of_run(run.path)
    assert checkpoint_step(record.job, "best", lambda: record.points) == best


def test_pull_of_what_is_not_there(client: DistillClient, tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed_job = client.submit(job_config("fail_at=3"))
    running_job = client.submit(job_config("pause=1", max_steps=99))
    client.wait(failed_job.id, timeout=20)
    with pytest.raises(WrongState, match="failed: the loss is not finite"):
        client.pull(failed_job.id, out)
    with pytest.raises(WrongState, match="has no export"):
        client.pull(running_job.id, out)
    with pytest.raises(NotFound, match="no checkpoint of step 3"):
        client.pull(failed_job.id, out, checkpoint=3)
    assert list(tmp_path.glob("*out*")) == []


def test_pull_follows_no_links(server: Server, client: DistillClient, tmp_path: Path) -> None:
    job = client.submit(job_config(max_steps=2))
    client.wait(job.id, timeout=20)
    (server.runs / job.id / "export" / "link").symlink_to("/etc/passwd")
    with pytest.raises(WrongState, match="link is a symbolic link"):
        client.pull(job.id, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_watchers_and_late_ones_see_the_same(client: DistillClient) -> None:
    job = client.submit(job_config("pause=0.02", max_steps=20))
    watched_events: list[list[object]] = [[], []]
    threads = [
        threading.Thread(target=lambda out=out: out.extend(client.watch(job.id)))
        for out in watched_events
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    late_events = list(client.watch(job.id))
    assert watched_events == [late_events, late_events]
    assert list(client.watch(job.id, after_seq=late_events[4].seq)) == late_events[5:]
    assert list(client.watch(job.id, after_seq=late_events[-1].seq)) == []
    with pytest.raises(InvalidInput) as exc_info:
        list(client.watch(job.id, after_seq=late_events[-1].seq + 1))
    assert exc_info.value.field == "after_seq"


def test_slow_watcher_holds_nobody_up_and_misses_nothing(client: DistillClient) -> None:
    job = client.submit(job_config("pause=0 every=1000", max_steps=600))
    slow_watch = client.watch(job.id)
    first_event = next(slow_watch)
    prompt_events = list(client.watch(job.id))
    assert prompt_events[-1].state is JobState.SUCCEEDED
    assert [first_event, *slow_watch] == prompt_events
    assert sum(bool(event.metrics) for event in prompt_events) == 600


def test_watch_of_a_resumed_job_goes_on_to_its_last_end(client: DistillClient) -> None:
    job = client.submit(job_config("fail_at=2"))
    client.wait(job.id, timeout=20)
    client.resume(job.id)
    states = [event.state for event in client.watch(job.id)]
    assert states.count(JobState.FAILED) == 2


def test_dead_server_is_told_within_the_timeout() -> None:
    with socket.socket() as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed_socket.getsockname()[1]}"
        with DistillClient(address, timeout=2, patience_seconds=0.5) as client:
            for call in (
                lambda: client.get("x"),
                lambda: client.submit(job_config()),
                client.list,
                lambda: client.resume("x"),
                lambda: list(client.watch("x")),
            ):
                start_time = time.monotonic()
                with pytest.raises(Unavailable, match=f"cannot reach the distill server {address}"):
                    call()
                assert time.monotonic() - start_time < 20  # ten times its limit


def test_silent_server_is_told_within_the_timeout() -> None:
    """The server accepts connections and never answers."""
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        silent_socket.listen()
        address = f"127.0.0.1:{silent_socket.getsockname()[1]}"
        with DistillClient(address, timeout=0.5) as client:
            start_time = time.monotonic()
            with pytest.raises((Unavailable, TimedOut)):
                client.get("x")
            assert time.monotonic() - start_time < 5


def test_watch_gives_up_when_the_server_stays_away(server: Server) -> None:
    with DistillClient(server.address, patience_seconds=0.5) as client:
        job = client.submit(job_config(max_steps=100_000))
        events = client.watch(job.id)
        next(events)
        server.kill()
        with pytest.raises(Unavailable):
            list(events)
        with pytest.raises(Unavailable):
            client.pull(job.id, f"{os.devnull}-out")
