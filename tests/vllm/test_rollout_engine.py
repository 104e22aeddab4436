"""The vllm rollout engine: the same tokens as transformers, whatever the weights and the batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protos.errors import WrongState
from student_trainer.rollout_client.order import Order
from student_trainer.rollouts.sampler import Marks, SampledTokens

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

from tests.vllm.rollouts import (  # noqa: E402
    SETTINGS,
    Service,
    Student,
    assert_sampled,
    exact_logits,
    order_of,
    prompts,
)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def service(student: Student) -> Iterator[Service]:
    service = Service(student.path)
    service.load(student.snapshot())
    yield service
    service.close()


def assert_exact(student: Student, order: Order, samples: Sequence[SampledTokens]) -> None:
    for sequence, got in zip(order.sequences, samples, strict=True):
        assert got.versions == ((student.number, len(got.token_ids)),)
        logits = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, order.settings, got, logits)


def assert_same_as_transformers(
    student: Student, order: Order, samples: Sequence[SampledTokens]
) -> None:
    """Rounding may decide an id where a random number lies on a boundary: about one in 10,000."""
    same = ids = differing = 0
    for got, expected in zip(samples, student.written(order), strict=True):
        if torch.equal(got.token_ids, expected.token_ids):
            same += 1
            assert (got.ended, got.closed) == (expected.ended, expected.closed)
            torch.testing.assert_close(
                got.token_logprobs, expected.token_logprobs, rtol=0, atol=1e-4
            )
            pairs = [(got.head_ids, expected.head_ids)]
            assert (got.draws is None) == (expected.draws is None)
            if got.draws is not None and expected.draws is not None:
                pairs.append((got.draws.ids, expected.draws.ids))
            ids += sum(engine_ids.numel() for engine_ids, _ in pairs)
            differing += sum(
                int((engine_ids != reference_ids).sum()) for engine_ids, reference_ids in pairs
            )
    assert same >= len(samples) - 1
    assert differing <= 4 + ids / 1000


@pytest.mark.parametrize(("tied", "ranks"), [(False, 1), (True, 1), (True, 2)])
def test_the_same_tokens_as_transformers(tied: bool, ranks: int, tmp_path: Path) -> None:
    """64 prompts of which some share a prefix of a whole block, 64 tokens, before and after three
    loads of really changed weights.
    """
    student = Student(tmp_path, tied=tied)
    service = Service(student.path, tensor_parallel_size=ranks)
    before = prompts(56, 60) + [prompts(1, 1)[0].repeat(150)] * 8
    try:
        with pytest.raises(WrongState, match="no weights were loaded"):  # vLLM's are random
            service.sample(order_of(student.snapshot(), before))
        earlier: list[SampledTokens] = []
        for _ in range(4):
            version = student.snapshot()
            service.load(version)
            order = order_of(version, before)
            (samples,) = service.sample(order)
            assert_exact(student, order, samples)
            assert_same_as_transformers(student, order, samples)
            assert {got.ended for got in samples} == {True, False}
            same = [
                torch.equal(a.token_ids, b.token_ids)
                for a, b in zip(earlier, samples, strict=False)
            ]
            assert sum(same) < 20
            earlier = samples
            student.learn()
    finally:
        service.close()


def test_bfloat16_has_a_float32_head(tmp_path: Path) -> None:
    """The recorded log-probs are those of float32 products of what the bfloat16 body gives.

    A head in bfloat16 rounds logits between 8 and 16 to multiples of 1/16.
    """
    student = Student(tmp_path)
    student.model.bfloat16().float()  # a snapshot for a bfloat16 engine has rounded weights
    version = student.snapshot()
    service = Service(student.path, dtype="bfloat16")
    try:
        service.load(version)
        order = order_of(version, prompts(16, 60))
        (samples,) = service.sample(order)
    finally:
        service.close()
    body = student.frozen().model.bfloat16()
    head = student.model.lm_head
    off, rounded = [], []
    for sequence, got in zip(order.sequences, samples, strict=True):
        all_token_ids = torch.cat([sequence.token_ids, got.token_ids[:-1]])
        first = len(sequence.token_ids) - 1
        with torch.no_grad():
            states = body.model(all_token_ids[None]).last_hidden_state[0, first:]
            for logits, differences in (
                (head(states.float()), off),
                (body.lm_head(states).float(), rounded),
            ):
                exact = (logits / order.settings.temperature).log_softmax(1)
                differences.append(
                    got.token_logprobs - exact.gather(1, got.token_ids[:, None])[:, 0]
                )
    print(torch.cat(off).std(), torch.cat(rounded).std())
    assert torch.cat(off).std() < torch.cat(rounded).std()


def test_alone_or_in_a_batch(student: Student, service: Service) -> None:
    order = order_of(student.snapshot(), prompts(24, 200, seed=1))
    (together,) = service.sample(order)
    single_orders = [replace(order, sequences=[sequence]) for sequence in order.sequences]
    backwards = replace(order, sequences=order.sequences[::-1])
    other_samples = [
        [samples for (samples,) in service.sample(*single_orders)],
        [service.sample(single_order)[0][0] for single_order in single_orders],
        service.sample(backwards)[0][::-1],
    ]
    for samples in other_samples:
        same = sum(
            torch.equal(a.token_ids, b.token_ids) for a, b in zip(together, samples, strict=True)
        )
        assert same >= len(together) - 1
        assert_exact(student, order, samples)


def test_orders_with_other_settings_at_the_same_time(student: Student, service: Service) -> None:
    """They share vLLM's batches; each sequence has its own limit and place in its stream."""
    version = student.snapshot()
    settings = [
        SETTINGS,
        replace(SETTINGS, seed=None),  # greedy: no draws
        replace(SETTINGS, top_k=0, draws=0, temperature=1.3, seed=4),
        replace(SETTINGS, top_k=64, draws=1, temperature=0.5, seed=5),
        replace(SETTINGS, vocab_size=300),  # the other ids are padding for some teacher
        replace(SETTINGS, top_k=3, draws=0, stream_tokens=45),
    ]
    orders = [
        order_of(version, prompts(8, 300, seed=number), [1, 2, 5, 10, 20, 40, 40, 40], entry, -3)
        for number, entry in enumerate(settings)
    ]
    later = [replace(entry, used=5) for entry in orders[-1].sequences]
    orders.append(replace(orders[-1], sequences=later))
    for order, samples in zip(orders, service.sample(*orders), strict=True):
        assert_exact(student, order, samples)
        assert_same_as_transformers(student, order, samples)


def test_more_sequences_than_vllm_runs_at_once(student: Student, service: Service) -> None:
    """They wait for their turn, and come back as they end."""
    order = order_of(student.snapshot(), prompts(600, 20, seed=2), 8)
    (samples,) = service.sample(order)
    some = replace(order, sequences=order.sequences[::20])
    assert_exact(student, some, samples[::20])
    assert_same_as_transformers(student, order, samples)


def test_a_mark_ends_a_sequence(student: Student, service: Service) -> None:
    marks = (*"abcdefghijklm", "XY", "Yz")
    order = order_of(student.snapshot(), prompts(32, 30, seed=3))
    marked = replace(order, settings=replace(SETTINGS, marks=marks))
    (plain,), (marked_samples,) = service.sample(order), service.sample(marked)
    closing = Marks(student.tokenizer, marks)
    closed = 0
    for plain_sample, got in zip(plain, marked_samples, strict=True):
        length = next(
            (
                n
                for n in range(1, len(plain_sample.token_ids) + 1)
                if closing.closed_by(plain_sample.token_ids[:n])
            ),
            None,
        )
        assert torch.equal(got.token_ids, plain_sample.token_ids[:length])
        assert torch.equal(got.head_ids, plain_sample.head_ids[:length])
        assert got.closed == (length is not None)
        assert got.ended == (plain_sample.ended and not got.closed)
        assert got.versions == ((student.number, len(got.token_ids)),)
        closed += got.closed
    assert 8 < closed < 32


def test_an_order_that_is_closed_leaves_nothing_behind(student: Student, service: Service) -> None:
    version = student.snapshot()
    engine = service.engine

    async def begin_an_order() -> None:
        sampling = engine.sample(order_of(version, prompts(20, 20, seed=4), 900))
        await anext(sampling)
        assert engine._llm.get_num_unfinished_requests() > 0
        await sampling.aclose()

    service.run(begin_an_order())
    assert engine._llm.get_num_unfinished_requests() == 0
    # A drain load is possible only when no order runs.
    service.load(version)
    order = order_of(version, prompts(4, 20, seed=5))
    assert_exact(student, order, service.sample(order)[0])
