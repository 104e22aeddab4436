"""Uploaded files: what the server requests, keeps, refuses and removes."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from clients.config.tables.data import DataConfig
from clients.jobs.client import DistillClient
from clients.jobs.upload import UploadProgress
from distill_server.uploads import MissingPart, UploadFile, Uploads, named_uploads
from protos.errors import Corrupt, InvalidInput, Unavailable, WrongState
from tests.distill_server.conftest import Server, job_config
from tests.small_disk import small_disk

CONTENT = random.Random(0).randbytes(1000)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def upload_file(path: str = "train.jsonl", content: bytes = CONTENT) -> UploadFile:
    return UploadFile(path, len(content), digest(content))


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


def send_files(uploads: Uploads, *files: tuple[str, bytes]) -> Path:
    """Send what the server requests, in parts of 300 bytes; return the path of the upload."""
    contents = {digest(content): content for _, content in files}
    upload_files = [upload_file(*file) for file in files]
    _, missing_parts = uploads.begin(upload_files)
    for missing_part in missing_parts:
        content = contents[missing_part.sha256]
        for start in range(missing_part.offset, max(1, len(content)), 300):
            uploads.receive(missing_part.sha256, start, content[start : start + 300])
    path, missing_parts = uploads.begin(upload_files)
    assert path is not None
    assert missing_parts == []
    return path


def test_a_file_and_a_directory(uploads: Uploads, tmp_path: Path) -> None:
    path = send_files(uploads, ("train.jsonl", CONTENT))
    assert path.name == "train.jsonl"
    assert path.read_bytes() == CONTENT
    folder = send_files(uploads, ("m/config.json", b"{}"), ("m/a/b.txt", CONTENT), ("m/empty", b""))
    assert folder.name == "m"
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "a" / "b.txt").samefile(path), "one content is stored once"
    assert (folder / "empty").read_bytes() == b""
    for file in (tmp_path / ".uploads" / "files").iterdir():
        assert digest(file.read_bytes()) == file.name
        assert file.stat().st_mode & 0o777 == 0o400
    assert list((tmp_path / ".uploads" / "parts").iterdir()) == []
    assert send_files(uploads, ("train.jsonl", CONTENT)) == path, "the same path, whoever sends it"


def test_only_what_is_missing_is_asked_for(uploads: Uploads, tmp_path: Path) -> None:
    other_content = b"other" * 100
    files = [upload_file("d/a"), upload_file("d/b", other_content), upload_file("d/c")]
    assert uploads.begin(files)[1] == [
        MissingPart(digest(CONTENT), 0),
        MissingPart(digest(other_content), 0),
    ]
    uploads.receive(digest(CONTENT), 0, CONTENT[:400])
    restarted = Uploads(tmp_path)  # a restarted server
    with pytest.raises(Unavailable, match="start the upload again"):
        restarted.receive(digest(CONTENT), 400, CONTENT[400:])
    assert restarted.begin(files)[1] == [
        MissingPart(digest(CONTENT), 400),
        MissingPart(digest(other_content), 0),
    ]
    restarted.receive(digest(CONTENT), 400, CONTENT[400:])
    assert restarted.begin(files)[1] == [MissingPart(digest(other_content), 0)]
    restarted.receive(digest(other_content), 0, other_content)
    path, _ = restarted.begin(files)
    assert path is not None
    assert [(path / name).read_bytes() for name in "abc"] == [CONTENT, other_content, CONTENT]


def test_a_part_that_is_early_or_comes_twice(uploads: Uploads) -> None:
    uploads.begin([upload_file()])
    name = digest(CONTENT)
    with pytest.raises(Unavailable):
        uploads.receive(name, 300, CONTENT[300:])
    uploads.receive(name, 0, CONTENT[:600])
    uploads.receive(name, 0, CONTENT[:300])
    uploads.receive(name, 300, CONTENT[300:])
    uploads.receive(name, 0, CONTENT[:300])  # a slower client, after the end
    path, _ = uploads.begin([upload_file()])
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_wrong_bytes_are_never_kept(uploads: Uploads, tmp_path: Path) -> None:
    uploads.begin([upload_file()])
    with pytest.raises(InvalidInput, match="the part has more bytes than the file"):
        uploads.receive(digest(CONTENT), 0, CONTENT + b"x")
    with pytest.raises(Corrupt, match="does not match its checksum"):
        uploads.receive(digest(CONTENT), 0, bytes(1000))
    assert uploads.begin([upload_file()]) == (None, [MissingPart(digest(CONTENT), 0)])
    with pytest.raises(Unavailable):
        uploads.receive("../../x", 0, b"")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".uploads", "files", "parts"]


def test_many_clients_send_the_same_file(uploads: Uploads) -> None:
    """Concurrently, with parts of different sizes."""
    content = random.Random(1).randbytes(1 << 20)
    name, faults = digest(content), []

    def client(step: int) -> None:
        try:
            while (progress := uploads.begin([upload_file("f", content)]))[0] is None:
                start = progress[1][0].offset
                uploads.receive(name, start, content[start : start + step])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=client, args=(5000 + 777 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    path, _ = uploads.begin([upload_file("f", content)])
    assert path is not None
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "paths",
    [
        ["/etc/passwd"],
        ["../x"],
        ["a/../b"],
        ["a//b"],
        ["a/./b"],
        ["a/"],
        ["."],
        [""],
        ["a\0b"],
        ["a\nb"],
        ["a", "a"],
        ["a/b", "a/b/c"],
        ["a/b", "c/d"],
        ["x" * 256],
        [],
        [f"d/{n}" for n in range(10_001)],
    ],
    ids=lambda paths: f"{len(paths)} {paths[0][:9]!r}" if paths else "none",
)
def test_paths_that_are_refused(uploads: Uploads, tmp_path: Path, paths: list[str]) -> None:
    with pytest.raises(InvalidInput):
        uploads.begin([upload_file(path) for path in paths])
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_that_is_refused(uploads: Uploads, tmp_path: Path) -> None:
    for bad_checksum in ("", "../x", "0" * 63, "G" * 64):
        with pytest.raises(InvalidInput, match="no sha256"):
            uploads.begin([UploadFile("a", 1, bad_checksum)])
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit_are_refused_before_they_are_sent(uploads: Uploads) -> None:
    with pytest.raises(WrongState, match=r"files need 1e\+09 GB, but the server's disk has"):
        uploads.begin([UploadFile("a", 10**18, digest(b"a"))])


def test_uploads_in_progress_share_the_free_space(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after parts have arrived, until one has ended or its client has been silent."""
    others = [upload_file("m/b", bytes(600)), upload_file("m/same", CONTENT)]

    def set_free(size: int) -> None:
        usage = shutil.disk_usage("/")._replace(free=(1 << 30) + size)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    set_free(1600)
    uploads.begin([upload_file()])
    assert uploads.begin(others)[1], "a file of both is counted once"
    with pytest.raises(WrongState, match=r"files need 1e-09 GB and other uploads 1.6e-06 GB, but"):
        uploads.begin([upload_file("c", b"c")])
    uploads.receive(digest(CONTENT), 0, CONTENT[:400])
    set_free(1200)
    uploads.begin([upload_file()])
    with pytest.raises(WrongState, match=r"and other uploads 1.2e-06 GB, but .* 1.2e-06 GB free"):
        uploads.begin([upload_file("c", b"c")])
    uploads.receive(digest(CONTENT), 400, CONTENT[400:])
    set_free(601)
    uploads.begin([upload_file("c", b"c")])
    monkeypatch.setattr("distill_server.uploads._IDLE_SECONDS", -1.0)
    uploads.begin([upload_file("d", b"d" * 601)])
    with pytest.raises(Unavailable, match="start the upload again"):
        uploads.receive(digest(b"c"), 0, b"c")


def test_files_keep_their_place_until_their_turn(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of an upload takes longer than the time without activity."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("time.monotonic", clock)
    first, second, other = (digest(content) for content in (CONTENT, b"second", b"other"))
    uploads.begin([upload_file("m/a"), upload_file("m/b", b"second")])
    uploads.begin([upload_file("n/a"), upload_file("n/b", b"other")])  # and is silent afterwards
    for n in range(4):
        clock.return_value += 400
        uploads.receive(first, 250 * n, CONTENT[250 * n : 250 * n + 250])
        uploads.begin([upload_file("c", b"c")])  # drops the files of silent clients
    clock.return_value += 400
    uploads.begin([upload_file("c", b"c")])
    uploads.receive(second, 0, b"second")
    clock.return_value += 1000
    uploads.begin([upload_file("c", b"c")])
    with pytest.raises(Unavailable, match="start the upload again"):
        uploads.receive(other, 0, b"other")


def test_a_disk_that_becomes_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Received data stays and is not sent again."""
    monkeypatch.setattr("distill_server.uploads._RESERVED_BYTES", 0)
    content = random.Random(2).randbytes(1 << 20)
    with small_disk(tmp_path / "disk", "4m") as disk:
        uploads = Uploads(disk)
        uploads.begin([upload_file("f", content)])
        uploads.receive(digest(content), 0, content[:4096])
        ballast = disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(WrongState, match="cannot write the file"):
            uploads.receive(digest(content), 4096, content[4096:])
        ballast.unlink()
        (missing_part,) = uploads.begin([upload_file("f", content)])[1]
        assert missing_part.offset >= 4096
        uploads.receive(digest(content), missing_part.offset, content[missing_part.offset :])
        path, _ = uploads.begin([upload_file("f", content)])
        assert path is not None
        assert path.read_bytes() == content


def test_what_no_job_names_is_removed_after_a_day(uploads: Uploads, tmp_path: Path) -> None:
    named_path = send_files(uploads, ("a.jsonl", CONTENT))
    unnamed_path = send_files(uploads, ("m/a.jsonl", CONTENT), ("m/b", b"b"))
    uploads.begin([upload_file("c", b"c" * 10)])
    uploads.receive(digest(b"c" * 10), 0, b"c" * 5)
    uploads.begin([upload_file("d", b"d"), upload_file("e", b"e")][:1])
    uploads.receive(digest(b"d"), 0, b"d")  # complete, and linked by no upload
    kept_uploads = {named_path.parent.name}
    uploads.collect(kept_uploads, cutoff=time.time() - 60)
    assert unnamed_path.exists(), "somebody may be about to submit its job"
    uploads.collect(kept_uploads, cutoff=time.time() + 60)
    remaining_files = [path for path in (tmp_path / ".uploads").rglob("*") if path.is_file()]
    assert {path.name for path in remaining_files} == {digest(CONTENT), "a.jsonl"}
    uploads.collect(set(), cutoff=time.time() + 60)
    uploads.collect(set(), cutoff=time.time() + 60)
    assert not [path for path in (tmp_path / ".uploads").rglob("*") if path.is_file()]
    assert send_files(uploads, ("a.jsonl", CONTENT)) == named_path, "it is sent again"


def test_what_is_asked_for_again_stays_for_another_day(uploads: Uploads, tmp_path: Path) -> None:
    path = send_files(uploads, ("a", CONTENT))
    uploads.begin([upload_file("b", b"b")])
    uploads.receive(digest(b"b"), 0, b"b")
    for old_path in (path.parent, tmp_path / ".uploads" / "files" / digest(b"b")):
        os.utime(old_path, (0, 0))
    uploads.begin([upload_file("a")])
    pair = [upload_file("m/b", b"b"), upload_file("m/c", b"c")]
    uploads.begin(pair)
    uploads.collect(set(), cutoff=time.time() - 60)
    assert path.exists()
    assert uploads.begin(pair)[1] == [MissingPart(digest(b"c"), 0)]


def test_a_server_that_restarts_between_two_files(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the retry of a single call waits."""
    monkeypatch.setattr("clients.jobs.connection._RESTART_SECONDS", 0.01)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(f'{{"prompt": "{name}", "answer": "b"}}\n')
    server, is_killed = make_server(), threading.Event()
    data = DataConfig(path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "test.jsonl"))
    config = job_config().model_copy(update={"data": data})

    def kill_server(progress: UploadProgress) -> None:
        if progress.key == "data.path":
            server.kill()
            is_killed.set()

    with DistillClient(server.address) as client, ThreadPoolExecutor() as pool:
        client.upload([config.model_copy(update={"data": DataConfig(path=data.path)})])
        upload = pool.submit(client.upload, [config], kill_server)
        assert is_killed.wait(60)
        server.start()
        (ready,) = upload.result(60)
    assert ready.data is not None
    assert ready.data.eval_path is not None
    assert Path(ready.data.eval_path).read_bytes() == (tmp_path / "test.jsonl").read_bytes()


def test_a_job_holds_what_it_names(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """According to the server's database, also after the job has ended and a restart."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    server = make_server()
    config = job_config().model_copy(
        update={"data": DataConfig(path=str(tmp_path / "train.jsonl"))}
    )
    with DistillClient(server.address) as client:
        (ready,) = client.upload([config])
        assert ready.data is not None
        path = Path(ready.data.path)
        assert path.read_text() == (tmp_path / "train.jsonl").read_text()
        assert path.is_relative_to(server.runs)
        assert client.upload([config]) == [ready]
        client.submit(ready).wait(60)
    server.kill()
    with sqlite3.connect(server.runs / "server.sqlite") as connection:
        assert named_uploads(connection) == {path.parent.name}
    connection.close()
