"""Captures that write to an object storage, and what reads their stores there."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from clients.config.offline import OfflineJob
from clients.runs.directory import RunDirectory
from clients.store.checks import count_sequences, damages, summary_of
from clients.store.copies import manifest_at, on_disk
from clients.store.dataset import LogitDataset
from clients.store.manifest import MANIFEST
from clients.store.merge import merge
from clients.store.objects import ObjectFolder
from protos.errors import Corrupt, Forbidden, NotFound, Unavailable, WrongState
from student_trainer.data.captured_stores import Stores, open_stores
from tests.faults.conftest import REPEATS
from tests.teacher_service.capture.forking import attempt, finish
from tests.teacher_service.capture.material import capture_here, digests, job

pytest.importorskip("moto")
from tests.object_storage import BUCKET, S3Server, prefix, server

__all__ = ["prefix", "server"]

pytestmark = pytest.mark.filterwarnings("default")  # moto's own

KILLS = REPEATS


@pytest.fixture(autouse=True)
def _environment(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture
def stored(server: S3Server, captured_store: Path, prefix: str, url: str) -> str:
    """The URL of a copy of the undisturbed store."""
    for file in captured_store.iterdir():
        if file.name != "lock":
            server.write(f"{prefix}/{file.name}", file.read_bytes())
    return url


def test_the_same_bytes_as_on_a_disk(
    data: Path,
    words: Path,
    captured_store: Path,
    server: S3Server,
    prefix: str,
    url: str,
    tmp_path: Path,
) -> None:
    """And nothing of the store on the disk."""
    verdict, _ = capture_here(tmp_path / "run", job(data, words, method__store=url))
    assert verdict == "succeeded"
    assert server.digests(prefix) == digests(captured_store)
    assert not list((tmp_path / "run").rglob("*.arrow"))
    # A complete store is resumed: nothing is left to do.
    assert capture_here(tmp_path / "again", job(data, words, method__store=url))[0] == "succeeded"
    assert server.digests(prefix) == digests(captured_store)


def test_data_in_a_storage(
    data: Path, words: Path, captured_store: Path, server: S3Server, prefix: str, tmp_path: Path
) -> None:
    """The same rows; the store names the data by its URL, on whatever machine it was captured."""
    server.write(f"{prefix}/{data.name}", data.read_bytes())
    url = f"s3://{BUCKET}/{prefix}/{data.name}"
    config = job(data, words)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": url})})
    verdict, store = capture_here(tmp_path / "run", config)
    assert verdict == "succeeded"
    manifest = manifest_at(store)
    assert manifest.metadata["data"] == url
    assert (
        manifest.metadata["data_fingerprint"]
        == manifest_at(captured_store).metadata["data_fingerprint"]
    )
    rows, undisturbed = LogitDataset(store), LogitDataset(captured_store)
    assert len(rows) == len(undisturbed)
    assert [rows.content(n) for n in range(len(rows))] == [
        undisturbed.content(n) for n in range(len(rows))
    ]


@pytest.mark.parametrize(
    "point",
    [
        "object-written",
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in ("capture-file-written", "capture-file-named")
        ),
    ],
)
def test_every_place_to_die(
    data: Path,
    words: Path,
    captured_store: Path,
    server: S3Server,
    prefix: str,
    url: str,
    point: str,
    tmp_path: Path,
) -> None:
    run = RunDirectory.create(tmp_path / "run", job(data, words, method__store=url))
    with attempt(run, failpoint=f"{point}:kill:5", environment=server.environment) as child:
        assert child.wait() == -signal.SIGKILL, child.log
    assert 0 < len(server.names(prefix)) < len(digests(captured_store))
    assert finish(run, 2, environment=server.environment) == 0, run.log_file(2).read_text()
    assert server.digests(prefix) == digests(captured_store)


@pytest.mark.slow
def test_killed_again_and_again(
    data: Path, words: Path, server: S3Server, prefix: str, url: str, tmp_path: Path
) -> None:
    slow = {"teacher__model": "vocab=64,latency_ms=30", "method__shard_bytes": 800}
    _, undisturbed = capture_here(tmp_path / "disk", job(data, words, **slow))
    run = RunDirectory.create(tmp_path / "run", job(data, words, method__store=url, **slow))
    for number in range(1, KILLS + 1):
        with attempt(run, number, environment=server.environment) as child:
            wait_for_files(server, prefix, number)
            child.kill()
            assert child.wait() == -signal.SIGKILL, child.log
    last = KILLS + 1
    assert finish(run, last, environment=server.environment) == 0, run.log_file(last).read_text()
    assert server.digests(prefix) == digests(undisturbed)


def wait_for_files(server: S3Server, prefix: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(name.endswith(".arrow") for name in server.names(prefix)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_shard_of_another_size_is_made_again(
    data: Path,
    words: Path,
    captured_store: Path,
    server: S3Server,
    prefix: str,
    stored: str,
    tmp_path: Path,
) -> None:
    """And one that is missing; a shard that no manifest names goes."""
    server.write(f"{prefix}/00000003.arrow", b"other")
    server.write(f"{prefix}/99999999.arrow", b"nobody's")
    run = RunDirectory.create(tmp_path / "run", job(data, words, method__store=stored))
    assert finish(run, environment=server.environment) == 0, run.log_file(1).read_text()
    assert "the object has 5 bytes" in run.log_file(1).read_text()
    assert server.digests(prefix) == digests(captured_store)


def test_rows_are_read_from_a_verified_copy(
    captured_store: Path, server: S3Server, prefix: str, stored: str
) -> None:
    local_rows, remote_rows = LogitDataset(captured_store), LogitDataset(stored)
    assert len(remote_rows) == len(local_rows) > 0
    for remote_row, local_row in zip(remote_rows, local_rows, strict=True):
        assert remote_row.keys() == local_row.keys()
        for name, value in remote_row.items():
            np.testing.assert_array_equal(value, local_row[name])
    assert digests(on_disk(stored)) == digests(captured_store)
    # Copied once: a second reader needs the manifest alone.
    server.delete(f"{prefix}/00000000.arrow")
    assert len(LogitDataset(stored)) == len(local_rows)


def test_damage_is_found(captured_store: Path, server: S3Server, prefix: str, stored: str) -> None:
    assert list(damages(stored)) == []
    content = bytearray((captured_store / "00000001.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    server.write(f"{prefix}/00000001.arrow", bytes(content))
    server.delete(f"{prefix}/00000002.arrow")
    assert list(damages(stored)) == [
        "shard 00000001.arrow: its sha256 does not match",
        "shard 00000002.arrow: the file is missing",
    ]
    with pytest.raises(Corrupt, match=r"shard 00000001.arrow of s3://"):
        LogitDataset(stored)


def test_a_summary_reads_the_manifest_alone(captured_store: Path, stored: str) -> None:
    remote, local = summary_of(stored), summary_of(captured_store)
    assert {**local, "path": stored} == {**local, **remote}
    assert local.keys() - remote.keys() == {"tokens", "rows", "bytes_per_row"}
    assert count_sequences(stored) == count_sequences(captured_store)


@pytest.mark.slow
def test_parts_are_merged(
    data: Path, words: Path, captured_store: Path, url: str, tmp_path: Path
) -> None:
    for number in (0, 1):
        part = job(data, words, method__store=url, method__shard=f"{number}/2")
        assert capture_here(tmp_path / f"run-{number}", part)[0] == "succeeded"
    merge(tmp_path / "merged", [f"{url}/shard-{number}-of-2" for number in (1, 0)])
    assert digests(tmp_path / "merged") == digests(captured_store)


def test_an_offline_job_reads_it(captured_store: Path, stored: str) -> None:
    def stores(path: str) -> Stores:
        table = {"student": {"model": "student"}, "method": {"type": "offline"}}
        config = {**table, "data": {"path": path}, "eval": {"prompts": 4}}
        return open_stores(OfflineJob.model_validate(config))

    remote_store, local_store = stores(stored).training, stores(str(captured_store)).training
    assert (remote_store.count, remote_store.longest, remote_store.identity) == (
        100,
        local_store.longest,
        local_store.identity,
    )


def test_the_later_of_two_writers_goes_on(server: S3Server, prefix: str, url: str) -> None:
    """The earlier one has written a file that it has not named, which the later one deletes."""
    earlier, later = ObjectFolder(url), ObjectFolder(url)
    earlier.claim()
    earlier.write("00000000.arrow", b"rows")
    later.claim()
    later.remove_unnamed([])
    assert "00000000.arrow" not in server.names(prefix)
    for name in (MANIFEST, "00000001.arrow"):
        with pytest.raises(WrongState, match="another process is writing to s3://"):
            earlier.write(name, b"{}")
        assert name not in server.names(prefix)
    later.write("00000000.arrow", b"rows")
    later.write(MANIFEST, b"{}")


def test_a_manifest_that_is_replaced_while_it_is_read(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader knows the size of the older one, and gets so many bytes of the newer one."""
    folder, read, cut = ObjectFolder(stored), ObjectFolder.read, [40, 90]

    def torn(self: ObjectFolder, name: str) -> bytes | None:
        content = read(self, name)
        assert content is not None
        return content[: cut.pop()] if cut else content

    monkeypatch.setattr(ObjectFolder, "read", torn)
    manifest = folder.manifest()
    assert manifest is not None
    assert sum(shard.count for shard in manifest.shards) == 100
    cut += [40] * 9
    with pytest.raises(Corrupt, match="is damaged"):
        folder.manifest()


@pytest.mark.slow
def test_two_captures_into_one_place(
    data: Path, words: Path, server: S3Server, prefix: str, url: str, tmp_path: Path
) -> None:
    """The later one goes on where the earlier one was."""
    slow = {"teacher__model": "vocab=64,latency_ms=30", "method__shard_bytes": 800}
    _, undisturbed = capture_here(tmp_path / "disk", job(data, words, **slow))
    config = job(data, words, method__store=url, **slow)
    earlier, later = (RunDirectory.create(tmp_path / name, config) for name in ("one", "two"))
    with attempt(earlier, environment=server.environment) as first:
        wait_for_files(server, prefix, 3)
        assert finish(later, environment=server.environment) == 0, later.log_file(1).read_text()
        assert first.wait() != 0
    assert "another process is writing to s3://" in earlier.log_file(1).read_text()
    assert server.digests(prefix) == digests(undisturbed)


def test_no_such_bucket(data: Path, words: Path, tmp_path: Path) -> None:
    """Told before the data is read."""
    config = job(data, words, method__store="s3://nobodys-bucket/rows")
    with pytest.raises(NotFound, match="there is no such bucket") as caught:
        capture_here(tmp_path / "run", config)
    assert caught.value.field == "method.store"
    with pytest.raises(NotFound, match="is not a store"):
        manifest_at(f"s3://{BUCKET}/nothing")


def test_refused_credentials(
    data: Path, words: Path, server: S3Server, url: str, tmp_path: Path
) -> None:
    server.refuse_everybody()
    try:
        with pytest.raises(Forbidden, match="refuses the credentials") as caught:
            capture_here(tmp_path / "run", job(data, words, method__store=url))
    finally:
        server.refuse_nobody()
    assert caught.value.field == "method.store"


def test_a_storage_that_is_away_is_waited_for(server: S3Server, stored: str, prefix: str) -> None:
    folder = ObjectFolder(stored)
    server.stop()
    back = threading.Timer(1.0, server.start)
    back.start()
    try:
        assert folder.manifest() is not None
    finally:
        back.join()


def test_a_storage_that_stays_away(server: S3Server, url: str) -> None:
    """A fault of the infrastructure: a server tries the job again."""
    folder = ObjectFolder(url, patience_seconds=0)
    server.stop()
    try:
        with pytest.raises(Unavailable, match="does not answer"):
            folder.manifest()
    finally:
        server.start()


def test_a_stop_is_heard_while_the_storage_is_away(
    data: Path, words: Path, server: S3Server, url: str, tmp_path: Path
) -> None:
    slow = {"teacher__model": "vocab=64,latency_ms=30", "method__shard_bytes": 800}
    run = RunDirectory.create(tmp_path / "run", job(data, words, method__store=url, **slow))
    with attempt(run, environment=server.environment) as child:
        wait_for_files(server, url.rpartition("/")[2], 1)
        server.stop()
        try:
            time.sleep(1.0)  # it may have begun to wait; a stop before that is heard as well
            os.kill(child.pid, signal.SIGTERM)
            start = time.monotonic()
            assert child.wait() == 0, child.log
            assert time.monotonic() - start < 100  # of the 300 s that it would wait
        finally:
            server.start()
    status = run.read_status()
    assert status is not None
    assert status.verdict == "cancelled"


@pytest.mark.parametrize(
    "place",
    [
        "s3://KEY:SECRET@bucket/rows",
        "s3://bucket/rows?access_key=KEY",
        "s3://bucket",
        "s3:/bucket/rows",
        "S3:bucket",
        "s3://bucket//rows",
        "http://host/rows",
    ],
)
def test_urls_that_are_refused(data: Path, words: Path, place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        job(data, words, method__store=place)
    assert "SECRET" not in str(caught.value.errors(include_input=False))


def test_a_url_of_a_disk_is_a_path(
    data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    config = job(data, words, method__store=f"file://{tmp_path}/rows")
    assert config.method.store == f"{tmp_path}/rows"
    capture_here(tmp_path / "run", config)
    assert digests(tmp_path / "rows") == digests(captured_store)
