"""Digests of weight files: equal to hashlib's, kept, and never those of other content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from teacher_service.models import digests
from teacher_service.models.digests import FileDigests


@pytest.fixture(autouse=True)
def _old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)


def files(folder: Path, count: int = 7) -> list[Path]:
    paths = [folder / f"model-{number}.safetensors" for number in range(count)]
    for number, file in enumerate(paths):
        file.write_bytes(os.urandom(1000 * number))
    return paths


def of(paths: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in paths}


def test_digests_are_kept_and_no_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, cache_path = files(tmp_path), tmp_path / "cache" / "digests.json"
    expected = of(paths)
    assert FileDigests(paths, cache_path).by_name() == expected
    assert cache_path.stat().st_mode & 0o077 == 0 or cache_path.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert FileDigests(paths, cache_path).by_name() == expected


def test_a_changed_file_is_read_again_even_with_its_old_times(tmp_path: Path) -> None:
    paths, cache_path = files(tmp_path), tmp_path / "digests.json"
    FileDigests(paths, cache_path).by_name()
    before = paths[3].stat()
    paths[3].write_bytes(os.urandom(before.st_size))
    os.utime(paths[3], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileDigests(paths, cache_path).by_name() == of(paths)
    paths[5].rename(tmp_path / "away")
    (tmp_path / "away").rename(paths[4])  # another file under the same name
    assert FileDigests(paths[:5], cache_path).by_name() == of(paths[:5])


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    paths, cache_path = files(tmp_path), tmp_path / "digests.json"
    file_digests = FileDigests(paths, cache_path)
    for future in file_digests._digests.values():
        assert not isinstance(future, str)
        future.result()
    paths[2].write_bytes(b"new")
    file_digests.by_name()
    assert FileDigests(paths, cache_path).by_name() == of(paths)


def test_a_file_that_was_just_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 1e6)
    paths, cache_path = files(tmp_path), tmp_path / "digests.json"
    FileDigests(paths, cache_path).by_name()
    assert not cache_path.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_a_damaged_or_foreign_cache_is_not_used(tmp_path: Path, content: str) -> None:
    paths, cache_path = files(tmp_path), tmp_path / "digests.json"
    cache_path.write_text(content)
    assert FileDigests(paths, cache_path).by_name() == of(paths)
    assert set(json.loads(cache_path.read_text()).values()) == set(of(paths).values())


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    paths = files(tmp_path)
    (tmp_path / "file").write_text("")
    assert FileDigests(paths, tmp_path / "file" / "digests.json").by_name() == of(paths)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    paths = files(tmp_path)
    file_digests = FileDigests(paths, tmp_path / "digests.json")
    assert file_digests.by_name() == of(paths)
    with pytest.raises(OSError, match="absent"):
        FileDigests([tmp_path / "absent"], tmp_path / "digests.json").by_name()
