"""Stored rows of somebody else: what no teacher returns is refused before training sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clients.store.dataset import LogitDataset
from clients.store.store import LogitStore, StoredRows
from protos.errors import Corrupt, InvalidInput
from protos.rows.codec import RowBlock, compress_rows, encode_rows

VOCABULARY, ROWS, K = 50, 6, 3
FACTS = {"vocab_size": str(VOCABULARY), "top_k": str(K), "tail_samples": "0"}
IDS = np.arange(ROWS + 2, dtype="<i4")
BLOCK = RowBlock(
    np.tile(np.arange(K, dtype=np.int32), (ROWS, 1)),
    np.full((ROWS, K), -2, np.float16),
    np.full(ROWS, -1, np.float32),
    np.full(ROWS, -3, np.float32),
)


def write_store(
    path: Path, block: RowBlock = BLOCK, ids: object = IDS, *, compressed: bool = False
) -> LogitDataset:
    """Return a data set with one sequence."""
    rows = encode_rows(block)
    rows = compress_rows(rows) if compressed else rows
    token_ids = np.asarray(ids, "<i4").tobytes()
    with LogitStore(path, write=True, metadata=FACTS) as store:
        store.append([StoredRows(b"k" * 32, token_ids, 2, rows)])
    return LogitDataset(path)


def with_id(wrong: int) -> RowBlock:
    head_ids = np.tile(np.arange(K, dtype=np.int32), (ROWS, 1))
    head_ids[4, 1] = wrong
    return replace(BLOCK, head_ids=head_ids)


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_a_capture_are_read(tmp_path: Path, compressed: bool) -> None:
    item = write_store(tmp_path, compressed=compressed)[0]
    np.testing.assert_array_equal(item["head_ids"], BLOCK.head_ids)
    np.testing.assert_array_equal(item["input_ids"], IDS)


@pytest.mark.parametrize(
    ("block", "ids", "problem"),
    [
        (with_id(VOCABULARY), IDS, "head_ids from 0 to 50, but there are 50 ids"),
        (replace(BLOCK, token_logprobs=np.full(ROWS, np.nan, np.float32)), IDS, "token_logprobs"),
        (replace(BLOCK, head_logprobs=np.full((ROWS, K), 0.5, np.float16)), IDS, "head_logprobs"),
        (BLOCK.slice(0, ROWS - 1), IDS, "5 rows with k = 3 do not match 6 tokens"),
        (BLOCK, [*IDS[:-1], VOCABULARY], "vocabulary"),
        (BLOCK, [*IDS[:-1], -1], "vocabulary"),
        (BLOCK, IDS[:2], "vocabulary"),
    ],
    ids=["head id", "NaN", "positive", "too few", "token id", "negative token", "no row"],
)
def test_rows_that_no_teacher_returns_are_refused(
    tmp_path: Path, block: RowBlock, ids: object, problem: str
) -> None:
    data = write_store(tmp_path, block, ids)
    with pytest.raises(Corrupt, match=problem) as refusal:
        data.decoded(0)
    assert "sequence 0 of" in refusal.value.message


def test_rows_that_expand_to_more_than_the_capture_has_are_refused(tmp_path: Path) -> None:
    wide = RowBlock(
        np.zeros((ROWS, 4096), np.int32),
        np.zeros((ROWS, 4096), np.float16),
        BLOCK.tail_logmass,
        BLOCK.token_logprobs,
    )
    with pytest.raises(Corrupt, match="takes more than"):
        write_store(tmp_path, wide, compressed=True).decoded(0)


def test_a_store_of_something_else_is_refused(tmp_path: Path) -> None:
    with LogitStore(tmp_path, write=True, metadata={"fingerprint": "abc"}) as store:
        store.append([StoredRows(b"k" * 32, IDS.tobytes(), 2, encode_rows(BLOCK))])
    with pytest.raises(InvalidInput, match="not written by distill capture"):
        LogitDataset(tmp_path)
