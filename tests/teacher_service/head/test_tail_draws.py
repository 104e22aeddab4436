"""Log-probs at the ids that a student drew: exact on every engine, cached, in large requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.teacher.client import TeacherClient
from clients.teacher.pending_answer import RowAssembly
from clients.teacher.query import MAX_TAIL_DRAWS, ScoreQuery, request_of, requests_of, row_key
from protos.errors import Corrupt, InvalidInput
from protos.rows.codec import RowBlock
from protos.rpc.transport import MAX_MESSAGE_BYTES
from teacher_service.engines.base import ScoringEngine
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.engines.hf import HfEngine
from teacher_service.engines.vllm_wire import decode_query, encode_query, slice_query
from teacher_service.head.scoring import score_hidden
from teacher_service.serving.answer_budget import AnswerBudget
from teacher_service.serving.score_stream import RequestParts
from teacher_service.serving.validation import RequestLimits, parse_request
from tests.teacher_service.conftest import StartTeacher

VOCAB = 90
LIMITS = RequestLimits(vocab_size=VOCAB, max_length=300_000, max_top_k=64)


def a_query(rows: int = 6, k: int = 4, draws: int = 5, *, by_teacher: bool = False) -> ScoreQuery:
    """Draws from everywhere: what they are of is the student's business."""
    rng = np.random.default_rng(rows)
    heads = np.stack([rng.permutation(VOCAB)[:k] for _ in range(rows)]).astype(np.int32)
    return ScoreQuery(
        rng.integers(0, VOCAB, rows + 3).astype(np.int32),
        3,
        top_k=k if by_teacher else None,
        head_ids=None if by_teacher else heads,
        draw_ids=rng.integers(0, VOCAB, (rows, draws)).astype(np.int32),
    )


@pytest.mark.parametrize("by_teacher", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_against_a_softmax(by_teacher: bool, chunk_rows: int | None) -> None:
    query = a_query(by_teacher=by_teacher)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(query.rows, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator)
    draws = torch.from_numpy(query.draw_ids).long()
    heads = None if query.head_ids is None else torch.from_numpy(query.head_ids).long()
    options = {"top_k": query.top_k, "head_ids": heads, "temperature": 0.7}
    tokens = torch.from_numpy(query.token_ids[query.start :]).long()
    rows = score_hidden(
        hidden, weight, token_ids=tokens, draw_ids=draws, chunk_rows=chunk_rows, **options
    )
    exact = (hidden.double() @ weight.double().T / 0.7).log_softmax(1)
    assert rows.draw_logprobs is not None
    torch.testing.assert_close(
        rows.draw_logprobs.double(), exact.gather(1, draws), atol=5e-6, rtol=0
    )
    without = score_hidden(hidden, weight, token_ids=tokens, chunk_rows=chunk_rows, **options)
    for name in ("head_ids", "head_logprobs", "tail_logmass", "token_logprobs"):
        assert torch.equal(getattr(rows, name), getattr(without, name)), name


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HfEngine:
    from tests.teacher_service.tiny_model import save_tiny_model

    return HfEngine(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))))


@pytest.mark.parametrize("by_teacher", [False, True])
@pytest.mark.parametrize("engine", ["fake", "hf"])
def test_each_engine_answers_what_a_whole_head_would(
    engine: str, by_teacher: bool, hf: HfEngine
) -> None:
    """The oracle: the same ids as a head, one draw a row, so that none is twice."""
    scoring_engine: ScoringEngine = hf if engine == "hf" else FakeEngine(FakeSettings(vocab=VOCAB))
    queries = [a_query(rows, by_teacher=by_teacher) for rows in (1, 6, 40)]
    plain = [replace(query, draw_ids=None) for query in queries]
    for query, answer, bare in zip(
        queries, scoring_engine.score(queries), scoring_engine.score(plain), strict=True
    ):
        assert isinstance(answer, RowBlock)
        assert isinstance(bare, RowBlock)
        assert query.draw_ids is not None
        assert answer.draw_logprobs is not None
        np.testing.assert_array_equal(answer.tail_logmass, bare.tail_logmass)
        np.testing.assert_array_equal(answer.head_logprobs, bare.head_logprobs)
        for place in range(query.tail_draws):
            head = query.draw_ids[:, place : place + 1]
            (of_head,) = scoring_engine.score(
                [replace(query, top_k=None, head_ids=head, draw_ids=None)]
            )
            assert isinstance(of_head, RowBlock)
            np.testing.assert_allclose(
                answer.draw_logprobs[:, place], of_head.head_logprobs[:, 0], atol=2e-5
            )


def test_over_the_wire_and_from_the_cache(start_teacher: StartTeacher, tmp_path: Path) -> None:
    teacher = start_teacher(
        *("--engine", "fake", "--model", f"vocab={VOCAB}"),
        *("--cache-dir", str(tmp_path / "cache")),
    )
    engine = FakeEngine(FakeSettings(vocab=VOCAB))
    draw_query = replace(a_query(40), f32=True)
    (expected,) = engine.score([draw_query])
    assert isinstance(expected, RowBlock)
    with TeacherClient(teacher.address) as client:
        assert client.info().max_tail_draws == MAX_TAIL_DRAWS
        for _ in range(2):
            rows = client.submit(draw_query).result(60)
            np.testing.assert_array_equal(rows.draw_logprobs, expected.draw_logprobs)
            np.testing.assert_array_equal(rows.head_ids, draw_query.head_ids)
        assert client.load().scored_tokens == draw_query.rows, "the second time, the cache answers"
        half = client.submit(replace(draw_query, f32=False)).result(60)
        assert half.draw_logprobs is not None
        assert half.draw_logprobs.dtype == np.float16
        assert draw_query.draw_ids is not None
        reversed_query = replace(draw_query, draw_ids=draw_query.draw_ids[:, ::-1])
        turned = client.submit(reversed_query).result(60)
        np.testing.assert_array_equal(turned.draw_logprobs, expected.draw_logprobs[:, ::-1])


def test_keys_differ_by_their_draws_and_by_nothing_new() -> None:
    query = a_query()
    assert query.draw_ids is not None
    keys = {
        row_key("f", 0, changed_query)
        for changed_query in (
            query,
            replace(query, draw_ids=None),
            replace(query, draw_ids=query.draw_ids[:, :4]),
            replace(query, draw_ids=query.draw_ids + 1),
            # The bytes of head and draws are the same, divided otherwise.
            replace(
                query,
                head_ids=np.concatenate([query.head_ids, query.draw_ids], 1)[:, :5],
                draw_ids=np.concatenate([query.head_ids, query.draw_ids], 1)[:, 5:],
            ),
        )
    }
    assert len(keys) == 5


@pytest.mark.parametrize("by_teacher", [False, True])
def test_a_request_of_several_messages(by_teacher: bool) -> None:
    rows = 30_000
    query = a_query(rows, 40, 80, by_teacher=by_teacher)
    messages = list(requests_of(query, "7"))
    assert len(messages) > 2
    assert all(message.ByteSize() <= MAX_MESSAGE_BYTES for message in messages)
    assert [message.more for message in messages] == [True] * (len(messages) - 1) + [False]
    share = AnswerBudget(1 << 30).share()
    parts = RequestParts(share)
    requests = [request for message in messages for request in parts.add(message)]
    ((request, error),) = requests
    assert error is None
    parsed = parse_request(request, LIMITS)
    np.testing.assert_array_equal(parsed.draw_ids, query.draw_ids)
    np.testing.assert_array_equal(parsed.head_ids, query.head_ids)
    assert parsed.top_k == query.top_k
    again = parse_request(request_of(a_query(), "1"), LIMITS)
    assert row_key("f", 0, again) == row_key("f", 0, a_query())


@pytest.mark.parametrize(
    ("draws", "says"),
    [
        (np.zeros(7, "<i4"), "draw_ids: 7 ids for 6 rows"),
        (np.zeros(6 * (MAX_TAIL_DRAWS + 1), "<i4"), "draw_ids: 1542 ids for 6 rows"),
        (np.full(6, VOCAB, "<i4"), r"draw_ids\[0\]: must be 0 to 89, got 90"),
        (np.full(6, -1, "<i4"), r"draw_ids\[0\]: must be 0 to 89, got -1"),
    ],
)
def test_bad_draws_are_refused(draws: np.ndarray, says: str) -> None:
    request = request_of(a_query(), "1")
    request.draw_ids = draws.tobytes()
    with pytest.raises(InvalidInput, match=says):
        parse_request(request, LIMITS)
    with pytest.raises(InvalidInput, match="both draw_ids and tail_samples"):
        replace(a_query(), tail_samples=1)


def test_a_teacher_that_ignores_draws_is_found_out() -> None:
    """As one from before there were any would."""
    from protos import teacher_pb2
    from protos.rows.codec import encode_rows

    query = a_query()
    (block,) = FakeEngine(FakeSettings(vocab=VOCAB)).score([replace(query, draw_ids=None)])
    assert isinstance(block, RowBlock)
    payload = encode_rows(replace(block, head_ids=None))
    chunk = teacher_pb2.ScoreChunk(first_position=3, count=query.rows, payload=payload, last=True)
    with pytest.raises(Corrupt, match=r"tail_draws = 0, but the query has .* tail_draws = 5"):
        RowAssembly(query).add(chunk, VOCAB)


@pytest.mark.parametrize("by_teacher", [False, True])
def test_the_way_to_the_process_of_vllm(by_teacher: bool) -> None:
    query = a_query(by_teacher=by_teacher)
    decoded_query = decode_query(encode_query(query))
    assert row_key("f", 0, decoded_query) == row_key("f", 0, query)
    part = slice_query(query, 4, 7)
    assert query.draw_ids is not None
    np.testing.assert_array_equal(part.draw_ids, query.draw_ids[1:4])
