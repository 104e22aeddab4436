"""The asyncio client has the rows and errors of the blocking client and does not block the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from clients import AsyncTeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput, Unavailable
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, FakeSettings
from tests.clients.teacher.test_client import VOCAB, fake_engine_options, make_queries
from tests.teacher_service.conftest import StartTeacher


def assert_rows(sent_queries: Sequence[ScoreQuery], blocks: Sequence[RowBlock]) -> None:
    for block, expected in zip(
        blocks, FakeEngine(FakeSettings(vocab=VOCAB)).score(sent_queries), strict=True
    ):
        assert isinstance(expected, RowBlock)
        np.testing.assert_array_equal(block.head_logprobs, expected.head_logprobs)
        np.testing.assert_array_equal(block.token_logprobs, expected.token_logprobs)


def test_rows_in_order_and_as_they_come(start_teacher: StartTeacher) -> None:
    teacher, sent_queries = start_teacher(*fake_engine_options()), make_queries(50)

    async def use_client() -> None:
        async with AsyncTeacherClient(teacher.address) as client:
            info, tokens = await asyncio.gather(client.info(), client.vocabulary())
            assert (info.vocab_size, len(tokens)) == (VOCAB, VOCAB)
            assert_rows(sent_queries, await client.score(iter(sent_queries)))
            assert_rows(sent_queries[:1], [await client.submit(sent_queries[0])])
            blocks = {number: rows async for number, rows in client.as_completed(sent_queries)}
            assert_rows(sent_queries, [blocks[number] for number in range(50)])
            assert await client.score([]) == []

    asyncio.run(use_client())


def test_an_error_ends_a_call_and_others_go_on(start_teacher: StartTeacher) -> None:
    """The slow teacher has not finished the other queries when the bad query is refused."""
    teacher = start_teacher(*fake_engine_options(latency_ms=500))
    bad_query = ScoreQuery(np.array([1, 2, VOCAB], np.int32), 1, top_k=2)

    async def use_client() -> None:
        async with AsyncTeacherClient(teacher.address) as client:
            good_future = client.submit(make_queries(1)[0])
            with pytest.raises(InvalidInput):
                await client.score([bad_query, *make_queries(3)])
            with pytest.raises(InvalidInput):
                await anext(client.as_completed([bad_query, *make_queries(3)]))
            waiting = asyncio.ensure_future(client.score(make_queries(3)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert_rows(make_queries(1), [await good_future])

    asyncio.run(use_client())


def test_a_closed_client(start_teacher: StartTeacher) -> None:
    teacher = start_teacher(*fake_engine_options(latency_ms=2000))

    async def use_client() -> None:
        client = AsyncTeacherClient(teacher.address)
        pending = client.submit(make_queries(1)[0])
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await pending
        with pytest.raises(Unavailable):
            client.submit(make_queries(1)[0])

    asyncio.run(use_client())
