"""The client's bookkeeping without a network: resuming, rescoring, and chunks that do not fit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, as_completed, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from clients.teacher.pending_requests import PendingRequests
from clients.teacher.query import ScoreQuery, answer_bytes
from protos import teacher_pb2
from protos.errors import Corrupt, InvalidInput, Unavailable
from protos.rows.codec import RowBlock, compress_rows, decode_rows, encode_rows
from teacher_service.cache.row_cache import EncodedRows
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.scorer import RowAnswer, split_into_chunks

K = 32
QUERY = ScoreQuery(np.random.default_rng(0).integers(0, 64, 12_000).astype(np.int32), 5, top_k=K)


def score_query(seed: int = 0) -> EncodedRows:
    block = FakeEngine(FakeSettings(vocab=64, max_length=20_000, seed=seed)).score([QUERY])[0]
    assert isinstance(block, RowBlock)
    return EncodedRows(encode_rows(block), block)


SCORED = score_query()


def make_chunks(
    request: teacher_pb2.ScoreRequest, sequence: EncodedRows = SCORED
) -> list[teacher_pb2.ScoreChunk]:
    make_chunks = RowAnswer(sequence, version=0)
    return list(split_into_chunks(make_chunks, QUERY, request.request_id, request.next_position))


def assert_all_rows(rows: RowBlock) -> None:
    assert encode_rows(rows) == SCORED.encoded
    assert rows.head_logprobs.flags.writeable


def make_window(requests: int, max_bytes: int = 1 << 40) -> PendingRequests:
    return PendingRequests(requests, max_bytes)


def test_a_resumed_request_asks_for_the_rest_only() -> None:
    window = make_window(4)
    future = window.submit(QUERY)
    stream = window.open()
    first_request = next(stream.requests())
    assert first_request.next_position == 0
    chunks = make_chunks(first_request)
    assert len(chunks) > 1
    assert all(len(chunk.SerializeToString()) <= 1 << 20 for chunk in chunks)
    stream.receive(chunks[0])

    stream.end()
    # The next stream: another teacher with the same rows, or the same teacher again.
    stream = window.open()
    second_request = next(stream.requests())
    assert second_request.next_position == QUERY.start + chunks[0].count
    # A late chunk of the first answer is not counted again.
    stream.receive(chunks[1])
    for chunk in make_chunks(second_request):
        stream.receive(chunk)
    assert_all_rows(future.result(0))


def test_another_scoring_starts_from_the_beginning() -> None:
    window = make_window(4)
    future = window.submit(QUERY)
    stream = window.open()
    first_request = next(stream.requests())
    stream.receive(make_chunks(first_request, score_query(seed=1))[0])
    stream.end()
    stream = window.open()
    requests = stream.requests()
    for chunk in make_chunks(next(requests)):
        stream.receive(chunk)
    assert not future.done()
    second_request = next(requests)
    assert second_request.next_position == 0
    for chunk in make_chunks(second_request):
        stream.receive(chunk)
    assert_all_rows(future.result(0))


def damage_payload(chunk: teacher_pb2.ScoreChunk) -> teacher_pb2.ScoreChunk:
    payload = bytearray(chunk.payload)
    payload[100] ^= 4
    return change_chunk(chunk, payload=bytes(payload))


def change_chunk(chunk: teacher_pb2.ScoreChunk, **values: Any) -> teacher_pb2.ScoreChunk:
    copy = teacher_pb2.ScoreChunk()
    copy.CopyFrom(chunk)
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


@pytest.mark.parametrize("fault", ["gap", "twice", "damaged", "count", "early", "other k", "f32"])
def test_rows_that_do_not_fit_are_never_used(fault: str) -> None:
    window = make_window(4)
    future = window.submit(QUERY)
    stream = window.open()
    chunks = make_chunks(next(stream.requests()))
    narrow_rows = encode_rows(
        RowBlock(
            SCORED.block.head_ids[:10, :3] if SCORED.block.head_ids is not None else None,
            *(SCORED.block.head_logprobs[:10, :3], *2 * (SCORED.block.tail_logmass[:10],)),
        )
    )
    float32_rows = encode_rows(SCORED.block.slice(0, 10), f32=True)
    received_chunks = {
        "gap": [chunks[1]],
        "twice": [chunks[0], chunks[0]],
        "damaged": [damage_payload(chunks[0])],
        "count": [change_chunk(chunks[0], count=chunks[0].count - 1)],
        "early": [change_chunk(chunks[0], last=True)],
        "other k": [change_chunk(chunks[0], payload=narrow_rows, count=10)],
        "f32": [change_chunk(chunks[0], payload=float32_rows, count=10)],
    }[fault]
    for chunk in received_chunks:
        stream.receive(chunk)
    assert isinstance(future.exception(0), Corrupt)


def change_rows(chunk: teacher_pb2.ScoreChunk, **columns: Any) -> teacher_pb2.ScoreChunk:
    block = decode_rows(chunk.payload, 1 << 22)
    return change_chunk(chunk, payload=encode_rows(replace(block, **columns)))


@pytest.mark.parametrize("fault", ["id", "NaN", "positive", "tail", "expanded"])
def test_rows_that_are_none_of_a_teacher_are_never_used(fault: str) -> None:
    """Their checksum is right: another program, or a faulty one, has made them."""
    window = make_window(4)
    future = window.submit(QUERY)
    stream = window.open(vocab_size=64)
    chunk = make_chunks(next(stream.requests()))[0]
    block = decode_rows(chunk.payload, 1 << 22)
    assert block.head_ids is not None
    ids, logprobs = block.head_ids.copy(), block.head_logprobs.copy()
    ids[7, 3], logprobs[9, 4] = 64, 0.25
    ones = np.ones_like(block.tail_logmass)
    wrong_chunk = {
        "id": lambda: change_rows(chunk, head_ids=ids),
        "NaN": lambda: change_rows(chunk, token_logprobs=ones * np.nan),
        "positive": lambda: change_rows(chunk, head_logprobs=logprobs),
        "tail": lambda: change_rows(chunk, tail_logmass=ones),
        "expanded": lambda: change_chunk(chunk, payload=compress_rows(encode_zeros(1 << 16))),
    }[fault]()
    stream.receive(wrong_chunk)
    with pytest.raises(Corrupt, match="takes more than" if fault == "expanded" else "rows have"):
        future.result(0)


def encode_zeros(rows: int) -> bytes:
    zeros = np.zeros(rows, np.float32)
    return encode_rows(
        RowBlock(np.zeros((rows, K), np.int32), np.zeros((rows, K), np.float32), zeros, zeros)
    )


def test_the_window_bounds_what_is_sent() -> None:
    window = make_window(2)
    futures = [window.submit(QUERY) for _ in range(4)]
    stream = window.open()
    requests = stream.requests()
    sent_requests = [next(requests), next(requests)]
    for chunk in make_chunks(sent_requests[0]):
        stream.receive(chunk)
    futures[2].cancel()
    third_request = next(requests)
    for chunk in make_chunks(sent_requests[1]) + make_chunks(third_request):
        stream.receive(chunk)
    assert [future.done() for future in futures] == [True] * 4
    assert_all_rows(futures[3].result(0))


class Sender:
    """A stream with a writer thread, as in gRPC; `answer_all` answers the sent requests."""

    def __init__(self, window: PendingRequests) -> None:
        self.sent_requests: list[teacher_pb2.ScoreRequest] = []
        self._stream = window.open()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        for request in self._stream.requests():
            self.sent_requests.append(request)

    def answer_all(self) -> None:
        for request in self.sent_requests:
            for chunk in make_chunks(request):
                self._stream.receive(chunk)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def wait_until_settled(sender: Sender) -> int:
    """Wait until the sender sends no more; return the number of requests sent."""
    count = -1
    while count != len(sender.sent_requests):
        count = len(sender.sent_requests)
        time.sleep(0.1)
    return count


def test_the_window_bounds_the_memory_of_answers() -> None:
    size = answer_bytes(QUERY)
    window = make_window(128, max_bytes=int(3.5 * size))
    futures = [window.submit(QUERY) for _ in range(8)]
    sender = Sender(window)
    assert wait_until_settled(sender) == 3
    sender.answer_all()
    # Answers that are not collected yet still count towards the memory limit.
    assert wait_until_settled(sender) == 3
    assert 3 * size <= window.held_bytes <= 3.5 * size
    assert sum(count_bytes(future.result(0)) for future in futures[:1]) == size
    assert wait_until_settled(sender) == 4
    # A future that is waited for is sent although the window is full: here the last one.
    waiter = threading.Thread(target=futures[7].result, args=(10,))
    waiter.start()
    assert wait_until_settled(sender) == 5
    sender.answer_all()
    waiter.join(10)
    del futures[1:7]  # these futures will never be read
    assert wait_until_settled(sender) == 8
    sender.answer_all()
    assert window.held_bytes == 0
    window.close()
    sender.join()


def count_bytes(rows: RowBlock) -> int:
    assert rows.head_ids is not None
    arrays = (rows.head_ids, rows.head_logprobs, rows.tail_logmass, rows.token_logprobs)
    return sum(array.nbytes for array in arrays)


def test_an_answer_larger_than_the_limit_goes_alone() -> None:
    window = make_window(128, max_bytes=10)
    futures = [window.submit(QUERY) for _ in range(2)]
    sender = Sender(window)
    assert wait_until_settled(sender) == 1
    sender.answer_all()
    futures[0].result(0)
    assert wait_until_settled(sender) == 2
    window.close()
    sender.join()


WAYS: dict[str, Callable[[list[Future[RowBlock]]], object]] = {
    "wait": lambda futures: wait(futures, timeout=10),
    "as_completed": lambda futures: [*as_completed(futures, timeout=10)],
    "asyncio": lambda futures: asyncio.run(gather_futures(futures)),
}


async def gather_futures(futures: list[Future[RowBlock]]) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*map(asyncio.wrap_future, futures))


@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_is_served_in_whatever_way(way: str) -> None:
    """The memory limit has room for one of ten answers."""
    window = make_window(128, max_bytes=10)
    futures = [window.submit(QUERY) for _ in range(10)]
    sender = Sender(window)
    waiter = threading.Thread(target=WAYS[way], args=(futures,))
    waiter.start()
    try:
        deadline = time.monotonic() + 10
        while len(sender.sent_requests) < 10 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(sender.sent_requests) == 10
        sender.answer_all()
        assert all(future.done() for future in futures)
    finally:
        window.close()
        waiter.join(20)
    sender.join()


def test_teachers_share_the_work_and_take_over() -> None:
    window = make_window(128)
    first_sender, second_sender = Sender(window), Sender(window)
    futures = [window.submit(QUERY) for _ in range(9)]
    assert sorted((wait_until_settled(first_sender), wait_until_settled(second_sender))) == [4, 5]
    lost_count = len(first_sender.sent_requests)
    first_sender._stream.end()
    first_sender.join()
    assert wait_until_settled(second_sender) == 9
    second_sender.answer_all()
    assert [future.done() for future in futures] == [True] * 9
    assert lost_count
    window.close()
    second_sender.join()


def test_an_overloaded_teacher_is_left_in_peace_and_another_asked() -> None:
    window = make_window(1)
    first_sender = Sender(window)
    future = window.submit(QUERY)
    assert wait_until_settled(first_sender) == 1
    second_sender = Sender(window)
    error = teacher_pb2.RequestError(code="RESOURCE_EXHAUSTED", retry_after_ms=60_000)
    request_id = first_sender.sent_requests[0].request_id
    first_sender._stream.receive(
        teacher_pb2.ScoreChunk(request_id=request_id, last=True, error=error)
    )
    assert (wait_until_settled(second_sender), wait_until_settled(first_sender)) == (1, 1)
    second_sender.answer_all()
    assert_all_rows(future.result(0))
    window.close()


def test_the_writer_of_a_dead_stream_sends_nothing() -> None:
    window = make_window(2)
    window.submit(QUERY)
    dead_stream = window.open()
    dead_stream.end()
    assert next(dead_stream.requests(), None) is None
    assert next(window.open().requests()).request_id


def test_a_closed_window_takes_nothing() -> None:
    window = make_window(2)
    future = window.submit(QUERY)
    window.close()
    assert future.cancelled()
    with pytest.raises(Unavailable):
        window.submit(QUERY)


def test_the_digest_is_of_the_encoded_rows() -> None:
    chunk = make_chunks(teacher_pb2.ScoreRequest(request_id="x"))[0]
    assert chunk.scoring_digest == xxhash.xxh3_64_intdigest(SCORED.encoded)


def test_a_teacher_that_takes_one_message_refuses_what_needs_several() -> None:
    window = make_window(2)
    heads = np.zeros((len(QUERY.token_ids) - 1, 100), np.int32)
    large_future = window.submit(ScoreQuery(QUERY.token_ids, 1, head_ids=heads))
    small_future = window.submit(QUERY)
    stream = window.open("old:1", max_request_bytes=4 << 20)
    assert not next(stream.requests()).more
    fault = large_future.exception(0)
    assert isinstance(fault, InvalidInput)
    assert "the teacher at old:1 takes 4194304" in str(fault)
    assert not small_future.done()
