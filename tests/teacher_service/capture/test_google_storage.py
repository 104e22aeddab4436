"""gs:// against an emulator of Google's storage: captures, the files of runs, and outages."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.store.objects import ObjectFolder
from protos.errors import Forbidden, NotFound, Unavailable
from protos.rpc.ports import free_ports
from tests.teacher_service.capture.material import capture_here, digests, job

emulator = pytest.importorskip("gcp_storage_emulator.server")

BUCKET = "rows"
EMULATOR = "CLOUD_STORAGE_EMULATOR_ENDPOINT"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (port,) = free_ports(1)
    process = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    process.start()
    monkeypatch.setenv(EMULATOR, f"http://127.0.0.1:{port}")
    yield process
    process.stop()


def test_the_same_bytes_as_on_a_disk(
    server: Any, data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/a store"
    for run in ("run", "again"):
        verdict, _ = capture_here(tmp_path / run, job(data, words, method__store=url))
        assert verdict == "succeeded"
        folder = ObjectFolder(url)
        object_digests = {name: folder.digest(name) for name in folder.facts() if name != "writer"}
        assert object_digests == digests(captured_store)


def test_files_and_folders(server: Any) -> None:
    folder = ObjectFolder(f"gs://{BUCKET}/a run")
    folder.require_bucket()
    folder.claim()
    large = bytes(range(256)) * 80_000
    folder.send("step/weights", io.BytesIO(large))
    folder.write("job.json", b"{}")
    assert folder.digest("step/weights") == hashlib.sha256(large).hexdigest()
    assert folder.read("job.json") == b"{}"
    assert folder.read("nothing") is None
    assert folder.tree() == {"job.json": 2, "step/weights": len(large), "writer": 32}
    folder.delete_folder("none")
    folder.delete_folder("step")
    folder.delete("job.json")
    assert folder.tree() == {"writer": 32}


def test_no_such_bucket(server: Any) -> None:
    folder = ObjectFolder("gs://nobody/x")
    with pytest.raises(NotFound, match="there is no such bucket"):
        folder.require_bucket()
    with pytest.raises(NotFound, match="there is no such bucket"):
        folder.claim()


@pytest.mark.slow
def test_a_storage_that_stays_away(server: Any) -> None:
    """Told after the time that was given, not after the 15 minutes of Google's library."""
    folder = ObjectFolder(f"gs://{BUCKET}/x", patience_seconds=2)
    server.stop()
    with pytest.raises(Unavailable, match="gs://rows/x does not answer"):
        folder.read("job.json")


@pytest.mark.slow
def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that has none is told so at once; Google's library takes it for an outage."""
    monkeypatch.delenv(EMULATOR, raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:9")  # nobody answers there
    with pytest.raises(Forbidden, match="refuses the credentials"):
        ObjectFolder(f"gs://{BUCKET}/x").require_bucket()
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(Forbidden, match=r"Cannot open credentials file .*none\.json"):
        ObjectFolder(f"gs://{BUCKET}/x").require_bucket()
