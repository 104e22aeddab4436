"""The client's bookkeeping without a network: resuming, rescoring, and chunks that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from clients.score_query import ScoreQuery
from clients.score_window import ScoreWindow
from protos import teacher_pb2
from protos.errors import Corrupt, Unavailable
from protos.rows import RowBlock, encode_rows
from teacher_service.cache import ScoredSequence
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.scorer import chunks_of

K = 32
QUERY = ScoreQuery(np.random.default_rng(0).integers(0, 64, 12_000).astype(np.int32), 5, top_k=K)


def scored(seed: int = 0) -> ScoredSequence:
    block = FakeEngine(FakeSettings(vocab=64, max_length=20_000, seed=seed)).score([QUERY])[0]
    assert isinstance(block, RowBlock)
    return ScoredSequence(encode_rows(block), block)


SCORED = scored()


def answer(
    request: teacher_pb2.ScoreRequest, sequence: ScoredSequence = SCORED
) -> list[teacher_pb2.ScoreChunk]:
    return list(chunks_of(sequence, QUERY, request.request_id, request.next_position))


def assert_whole(rows: RowBlock) -> None:
    assert encode_rows(rows) == SCORED.encoded
    assert rows.head_logprobs.flags.writeable


def test_a_resumed_request_asks_for_the_rest_only() -> None:
    window = ScoreWindow(4)
    future = window.submit(QUERY)
    first = next(window.requests())
    assert first.next_position == 0
    chunks = answer(first)
    assert len(chunks) > 1
    assert all(len(chunk.SerializeToString()) <= 1 << 20 for chunk in chunks)
    window.receive(chunks[0])

    window.reconnect()
    second = next(window.requests())
    assert second.next_position == QUERY.start + chunks[0].count
    # What is left of the first answer, had it stayed in a buffer, is not counted again.
    window.receive(chunks[1])
    for chunk in answer(second):
        window.receive(chunk)
    assert_whole(future.result(0))


def test_another_scoring_starts_from_the_beginning() -> None:
    window = ScoreWindow(4)
    future = window.submit(QUERY)
    first = next(window.requests())
    window.receive(answer(first, scored(seed=1))[0])
    window.reconnect()
    stream = window.requests()
    for chunk in answer(next(stream)):
        window.receive(chunk)
    assert not future.done()
    again = next(stream)
    assert again.next_position == 0
    for chunk in answer(again):
        window.receive(chunk)
    assert_whole(future.result(0))


def damaged(chunk: teacher_pb2.ScoreChunk) -> teacher_pb2.ScoreChunk:
    payload = bytearray(chunk.payload)
    payload[100] ^= 4
    return changed(chunk, payload=bytes(payload))


def changed(chunk: teacher_pb2.ScoreChunk, **values: Any) -> teacher_pb2.ScoreChunk:
    other = teacher_pb2.ScoreChunk()
    other.CopyFrom(chunk)
    for name, value in values.items():
        setattr(other, name, value)
    return other


@pytest.mark.parametrize("fault", ["gap", "twice", "damaged", "count", "early", "other k"])
def test_rows_that_do_not_fit_are_never_used(fault: str) -> None:
    window = ScoreWindow(4)
    future = window.submit(QUERY)
    chunks = answer(next(window.requests()))
    narrow = encode_rows(
        RowBlock(
            SCORED.block.head_ids[:10, :3] if SCORED.block.head_ids is not None else None,
            *(SCORED.block.head_logprobs[:10, :3], *2 * (SCORED.block.tail_logmass[:10],)),
        )
    )
    sent = {
        "gap": [chunks[1]],
        "twice": [chunks[0], chunks[0]],
        "damaged": [damaged(chunks[0])],
        "count": [changed(chunks[0], count=chunks[0].count - 1)],
        "early": [changed(chunks[0], last=True)],
        "other k": [changed(chunks[0], payload=narrow, count=10)],
    }[fault]
    for chunk in sent:
        window.receive(chunk)
    assert isinstance(future.exception(0), Corrupt)


def test_the_window_bounds_what_is_sent() -> None:
    window = ScoreWindow(2)
    futures = [window.submit(QUERY) for _ in range(4)]
    stream = window.requests()
    sent = [next(stream), next(stream)]
    for chunk in answer(sent[0]):
        window.receive(chunk)
    futures[2].cancel()
    third = next(stream)
    for chunk in answer(sent[1]) + answer(third):
        window.receive(chunk)
    assert [future.done() for future in futures] == [True] * 4
    assert_whole(futures[3].result(0))


def test_the_writer_of_a_dead_stream_sends_nothing() -> None:
    window = ScoreWindow(2)
    window.submit(QUERY)
    dead = window.requests()
    window.reconnect()
    assert next(dead, None) is None
    assert next(window.requests()).request_id


def test_a_closed_window_takes_nothing() -> None:
    window = ScoreWindow(2)
    future = window.submit(QUERY)
    window.close()
    assert future.cancelled()
    with pytest.raises(Unavailable):
        window.submit(QUERY)


def test_the_digest_is_of_the_encoded_rows() -> None:
    chunk = answer(teacher_pb2.ScoreRequest(request_id="x"))[0]
    assert chunk.scoring_digest == xxhash.xxh3_64_intdigest(SCORED.encoded)
