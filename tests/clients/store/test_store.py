"""The store on disk: appended rows are readable whatever happens to the writer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clients.store.store import LogitStore, StoredRows
from protos.errors import Corrupt, WrongState
from protos.rows.codec import RowBlock, decode_rows, encode_rows

ROOT = Path(__file__).parents[3]
META = {"fingerprint": "abc"}


def entry(number: int, rows: int = 3) -> StoredRows:
    """Return rows derived from the number, so that a test can check them."""
    rng = np.random.default_rng(number)
    block = RowBlock(
        rng.integers(0, 99, (rows, 4)).astype(np.int32),
        -rng.random((rows, 4)).astype(np.float32),
        -rng.random(rows).astype(np.float32),
        -rng.random(rows).astype(np.float32),
    )
    tokens = np.arange(rows + 1, dtype="<i4").tobytes()
    return StoredRows(number.to_bytes(32, "big"), tokens, 1, encode_rows(block))


def test_append_get_iterate_reopen(tmp_path: Path) -> None:
    entries = [entry(i, rows=1 + i) for i in range(6)]
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append(entries[:4])
        store.append(entries[4:])
        store.append([])
        assert list(store) == entries
    with LogitStore(tmp_path) as store:
        assert store.metadata == META
        assert list(store) == entries
        assert len(store) == 6
        assert store.get(entries[3].key) == entries[3].rows
        assert store.get(b"?" * 32) is None
        store.verify()
        with pytest.raises(WrongState):
            store.append(entries)
    assert len(list(tmp_path.glob("*.arrow"))) == 2


def test_the_oldest_shard_goes_and_its_readers_stay(tmp_path: Path) -> None:
    entries = [entry(i) for i in range(4)]
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        for rows in entries[:3]:
            store.append([rows])
        store.append([entries[0]])  # the same key again: the newer rows count
        with LogitStore(tmp_path) as reader:
            store.drop_oldest()
            store.drop_oldest()
            assert list(store) == [entries[2], entries[0]]
            assert store.get(entries[1].key) is None
            assert [reader.get(rows.key) for rows in entries[:3]] == [
                rows.rows for rows in entries[:3]
            ]
        store.append([entries[3]])
        assert len(store.sizes) == 3
    with LogitStore(tmp_path) as store:
        store.verify()
        assert list(store) == [entries[2], entries[0], entries[3]]
        with pytest.raises(WrongState):
            store.drop_oldest()
    assert sorted(file.name for file in tmp_path.glob("*.arrow")) == [
        f"{number:08d}.arrow" for number in (2, 3, 4)
    ]


def test_a_kill_between_manifest_and_unlink_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
        store.append([entry(2)])
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.drop_oldest()
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        assert list(store) == [entry(2)]
    assert [file.name for file in tmp_path.glob("*.arrow")] == ["00000001.arrow"]


def test_one_writer_many_readers(tmp_path: Path) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
        with pytest.raises(WrongState, match="another process"):
            LogitStore(tmp_path, write=True, metadata=META)
        with LogitStore(tmp_path) as reader:
            assert len(reader) == 1
    LogitStore(tmp_path, write=True, metadata=META).close()


def test_rows_of_something_else_are_refused(tmp_path: Path) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
    with pytest.raises(WrongState, match="holds rows with other metadata"):
        LogitStore(tmp_path, metadata={"fingerprint": "other"})


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
    (tmp_path / "00000001.arrow").write_bytes(b"renamed, but in no manifest")
    (tmp_path / "00000002.arrow.tmp").write_bytes(b"half")
    with LogitStore(tmp_path) as reader:
        assert len(reader) == 1
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        assert sorted(file.name for file in tmp_path.glob("*.arrow*")) == ["00000000.arrow"]
        store.append([entry(2)])
    with LogitStore(tmp_path) as reader:
        assert len(reader) == 2


def readable_rows(store: LogitStore, key: bytes) -> bytes | None:
    """Return the rows that a reader would use: None if they are missing or known to be damaged."""
    try:
        rows = store.get(key)
        if rows is not None:
            decode_rows(rows, 1 << 20)
    except Corrupt:
        return None
    return rows


def test_every_changed_byte_is_harmless(tmp_path: Path) -> None:
    """A flipped bit gives an unreadable shard, an unknown key, or rows that fail verification."""
    entries = [entry(i) for i in range(3)]
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append(entries)
    shard = tmp_path / "00000000.arrow"
    data = shard.read_bytes()
    for offset in range(0, len(data), 7):
        shard.write_bytes(data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        with LogitStore(tmp_path) as store:
            with pytest.raises(Corrupt, match="sha256"):
                store.verify()
            for stored in entries:
                assert readable_rows(store, stored.key) in (None, stored.rows)


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_cut_shard_is_left_out(tmp_path: Path, length: int) -> None:
    with LogitStore(tmp_path, write=True, metadata=META) as store:
        store.append([entry(1)])
        store.append([entry(2)])
    shard = tmp_path / "00000000.arrow"
    shard.write_bytes(shard.read_bytes()[:length])
    with LogitStore(tmp_path) as store:
        assert store.unreadable == ["00000000.arrow"]
        assert [rows.key for rows in store] == [entry(2).key]


def test_an_unreadable_manifest_is_said(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 1')
    with pytest.raises(Corrupt, match="manifest"):
        LogitStore(tmp_path)
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema_version": 99, "metadata": {}, "shards": []})
    )
    with pytest.raises(WrongState, match="99"):
        LogitStore(tmp_path)
