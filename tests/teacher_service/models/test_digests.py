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
    made = [folder / f"model-{number}.safetensors" for number in range(count)]
    for number, file in enumerate(made):
        file.write_bytes(os.urandom(1000 * number))
    return made


def of(made: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in made}


def test_digests_are_kept_and_no_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = files(tmp_path), tmp_path / "cache" / "digests.json"
    expected = of(made)
    assert FileDigests(made, kept).by_name() == expected
    assert kept.stat().st_mode & 0o077 == 0 or kept.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert FileDigests(made, kept).by_name() == expected


def test_a_changed_file_is_read_again_even_with_its_old_times(tmp_path: Path) -> None:
    made, kept = files(tmp_path), tmp_path / "digests.json"
    FileDigests(made, kept).by_name()
    before = made[3].stat()
    made[3].write_bytes(os.urandom(before.st_size))
    os.utime(made[3], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileDigests(made, kept).by_name() == of(made)
    made[5].rename(tmp_path / "away")
    (tmp_path / "away").rename(made[4])  # another file under the same name
    assert FileDigests(made[:5], kept).by_name() == of(made[:5])


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    made, kept = files(tmp_path), tmp_path / "digests.json"
    found = FileDigests(made, kept)
    for future in found._digests.values():
        assert not isinstance(future, str)
        future.result()
    made[2].write_bytes(b"new")
    found.by_name()
    assert FileDigests(made, kept).by_name() == of(made)


def test_a_file_that_was_just_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 1e6)
    made, kept = files(tmp_path), tmp_path / "digests.json"
    FileDigests(made, kept).by_name()
    assert not kept.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_a_damaged_or_foreign_cache_is_not_used(tmp_path: Path, content: str) -> None:
    made, kept = files(tmp_path), tmp_path / "digests.json"
    kept.write_text(content)
    assert FileDigests(made, kept).by_name() == of(made)
    assert set(json.loads(kept.read_text()).values()) == set(of(made).values())


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    made = files(tmp_path)
    (tmp_path / "file").write_text("")
    assert FileDigests(made, tmp_path / "file" / "digests.json").by_name() == of(made)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    made = files(tmp_path)
    found = FileDigests(made, tmp_path / "digests.json")
    assert found.by_name() == of(made)
    with pytest.raises(OSError, match="absent"):
        FileDigests([tmp_path / "absent"], tmp_path / "digests.json").by_name()
