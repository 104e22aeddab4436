"""Orders and sampled sequences survive the wire; wrong messages are refused with their field."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import rollouts_pb2
from protos.errors import Corrupt, InvalidInput
from student_trainer.data.sequence import TailDraws
from student_trainer.rollout_client import wire
from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_client.wire import OrderLimits, OrderReader, SampledReader
from student_trainer.rollouts.sampler import SampledTokens

LIMITS = OrderLimits(vocab_size=100, max_length=50, in_flight=("drain", "keep"))
VERSION = WeightsVersion("run.1", 3, Path("/snapshots/3"), "keep")
SETTINGS = SamplingSettings(
    top_k=5, temperature=0.7, draws=2, seed=9, stream_tokens=40, batch_tokens=60, marks=("</a>",)
)


def make_request(*ids: int, limit: int = 10, **options: int) -> SequenceRequest:
    return SequenceRequest(torch.tensor(ids), options.pop("number", 4), limit, **options)


ORDER = Order(VERSION, SETTINGS, [make_request(1, 2, 99), make_request(7, number=-5, used=30)])


def read_order(parts: list[rollouts_pb2.OrderPart]) -> Order:
    reader = OrderReader(LIMITS)
    for part in parts:
        reader.add(rollouts_pb2.OrderPart.FromString(part.SerializeToString()))
    return reader.order()


@pytest.mark.parametrize("vocab_size", [None, 90])
@pytest.mark.parametrize("seed", [None, 9])
def test_an_order_arrives_as_it_was_sent(seed: int | None, vocab_size: int | None) -> None:
    settings = replace(SETTINGS, seed=seed, vocab_size=vocab_size)
    received = read_order(wire.order_parts(Order(VERSION, settings, ORDER.sequences)))
    assert (received.weights, received.settings) == (VERSION, settings)
    for request, expected in zip(received.sequences, ORDER.sequences, strict=True):
        assert request.token_ids.dtype == torch.int64
        assert torch.equal(request.token_ids, expected.token_ids)
        assert vars(request) | {"token_ids": 0} == vars(expected) | {"token_ids": 0}


def set_header(**values: Any) -> Callable[[list[rollouts_pb2.OrderPart]], None]:
    def change(parts: list[rollouts_pb2.OrderPart]) -> None:
        for name, value in values.items():
            setattr(parts[0].header, name, value)

    return change


def set_weights(**values: Any) -> Callable[[list[rollouts_pb2.OrderPart]], None]:
    def change(parts: list[rollouts_pb2.OrderPart]) -> None:
        for name, value in values.items():
            setattr(parts[0].header.weights, name, value)

    return change


def set_sequence(**values: Any) -> Callable[[list[rollouts_pb2.OrderPart]], None]:
    def change(parts: list[rollouts_pb2.OrderPart]) -> None:
        for name, value in values.items():
            setattr(parts[2].sequence, name, value)

    return change


def set_marks(*marks: str) -> Callable[[list[rollouts_pb2.OrderPart]], None]:
    return lambda parts: parts[0].header.marks.extend(marks)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_header(top_k=101), "top_k"),
        (set_header(vocab_size=101), "vocab_size"),
        (set_header(vocab_size=4), "top_k"),
        (set_header(draws=257), "draws"),
        (set_header(temperature=0.0), "temperature"),
        (set_header(temperature=float("nan")), "temperature"),
        (set_header(temperature=float("inf")), "temperature"),
        (set_header(seed=1 << 32), "seed"),
        (set_header(stream_tokens=0), "stream_tokens"),
        (set_header(stream_tokens=1 << 31), "stream_tokens"),
        (set_header(batch_tokens=0), "batch_tokens"),
        (set_header(sequences=0), "sequences"),
        (set_header(sequences=1 << 17), "sequences"),
        (set_header(sequences=3), "sequences"),
        (set_header(sequences=1), "sequences[1]"),
        (set_marks(""), "marks"),
        (set_marks("x" * 1001), "marks"),
        (set_marks(*["x"] * 64), "marks"),
        (set_weights(lineage=""), "weights.lineage"),
        (set_weights(lineage="x" * 1001), "weights.lineage"),
        (set_weights(directory="snapshots"), "weights.directory"),
        (set_weights(directory=""), "weights.directory"),
        (set_weights(in_flight=0), "weights.in_flight"),
        (set_weights(in_flight=rollouts_pb2.IN_FLIGHT_RECOMPUTE), "weights.in_flight"),
        (set_weights(in_flight=9), "weights.in_flight"),
        (set_sequence(token_ids=b""), "sequences[1].token_ids"),
        (set_sequence(token_ids=b"123"), "sequences[1].token_ids"),
        (set_sequence(token_ids=struct.pack("<2i", 1, 100)), "sequences[1].token_ids[1]"),
        (set_sequence(token_ids=struct.pack("<i", -1)), "sequences[1].token_ids[0]"),
        (set_sequence(limit=0), "sequences[1].limit"),
        (set_sequence(limit=50), "sequences[1].limit"),
        (set_sequence(used=31), "sequences[1].used"),
        (set_sequence(number=1 << 62), "sequences[1].number"),
        (lambda parts: parts.pop(0), "part"),
        (lambda parts: parts.insert(1, parts[0]), "part"),
        (lambda parts: parts.append(rollouts_pb2.OrderPart()), "part"),
        (lambda parts: parts.clear(), "header"),
    ],
)
def test_a_wrong_order_is_refused(
    change: Callable[[list[rollouts_pb2.OrderPart]], object], field: str
) -> None:
    parts = wire.order_parts(ORDER)
    change(parts)
    with pytest.raises(InvalidInput) as caught:
        read_order(parts)
    assert caught.value.field == field
    assert caught.value.hint


def test_a_huge_order_is_refused_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TOKENS", 92)
    with pytest.raises(InvalidInput, match="at most 92 tokens") as caught:
        read_order(wire.order_parts(Order(VERSION, SETTINGS, [make_request(1, limit=30)] * 3)))
    assert caught.value.field == "sequences[2]"


@pytest.mark.parametrize("value", [-1, 1 << 32, "x"])
def test_what_no_message_can_hold_is_refused_by_the_client(value: Any) -> None:
    settings = SamplingSettings(**{**vars(SETTINGS), "top_k": value})
    with pytest.raises(InvalidInput, match="the order cannot be encoded"):
        wire.order_parts(Order(VERSION, settings, ORDER.sequences))


def test_a_sequence_larger_than_a_message_is_refused_by_the_client() -> None:
    large = SequenceRequest(torch.zeros(1 << 20, dtype=torch.long), 0, 1)
    with pytest.raises(InvalidInput) as caught:
        wire.order_parts(Order(VERSION, SETTINGS, [large]))
    assert caught.value.field == "sequences[0].token_ids"


def make_sampled(tokens: int, top_k: int, draws: int, *, vocab_size: int = 100) -> SampledTokens:
    generator = torch.Generator().manual_seed(tokens + top_k)
    ids = torch.randint(vocab_size, (tokens, 1 + top_k + draws), generator=generator)
    logprobs = -torch.rand(tokens, 1 + draws, generator=generator)
    tail_draws = TailDraws(ids[:, 1 + top_k :].int(), logprobs[:, 1:].clone())
    if draws:
        tail_draws.logprobs[0] = torch.inf  # a placeholder
    return SampledTokens(
        *(ids[:, 0].clone(), ids[:, 1 : 1 + top_k].int(), logprobs[:, 0].clone(), True, False),
        tail_draws if draws else None,
        ((3, 1), (4, tokens - 1)),
    )


def make_order(tokens: int, top_k: int, draws: int) -> Order:
    changes = {"top_k": top_k, "draws": draws}
    return Order(
        VERSION,
        SamplingSettings(**{**vars(SETTINGS), **changes}),
        [make_request(1, limit=tokens)] * 3,
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "draws"), [(2, 5, 2), (7, 0, 0), (16384, 112, 0), (16384, 64, 48)]
)
def test_sampled_tokens_arrive_to_the_bit(tokens: int, top_k: int, draws: int) -> None:
    """Parts of several sequences may alternate."""
    sequence = make_sampled(tokens, top_k, draws)
    streams = [list(wire.sampled_parts(index, sequence)) for index in (2, 0)]
    assert all(part.ByteSize() <= 1 << 20 for part in streams[0])
    assert len(streams[0]) == -(-tokens * (8 + 4 * top_k + 8 * draws) // ((1 << 20) - 1024))
    reader = SampledReader(make_order(tokens, top_k, draws), 100)
    received = [reader.add(part) for pair in zip(*streams, strict=True) for part in pair]
    assert [entry for entry in received[:-2] if entry] == []
    for entry, index in zip(received[-2:], (2, 0), strict=True):
        assert entry is not None
        assert entry[0] == index
        assert vars(entry[1]).keys() == vars(sequence).keys()
        for name, value in vars(sequence).items():
            received_value = getattr(entry[1], name)
            if isinstance(value, TailDraws):
                assert torch.equal(value.ids, received_value.ids)
                assert received_value.ids.dtype == torch.int32
                assert torch.equal(value.logprobs, received_value.logprobs)
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, received_value)
                assert value.dtype == received_value.dtype
            else:
                assert value == received_value
    assert not reader.complete


def set_part(**values: Any) -> Callable[[rollouts_pb2.SampledPart], None]:
    def change(part: rollouts_pb2.SampledPart) -> None:
        for name, value in values.items():
            setattr(part, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_part(index=3), "sequence 3 twice or without a request"),
        (set_part(index=0), "sequence 0 twice or without a request"),
        (set_part(first=1), "of sequence 1 from position 1"),
        (set_part(token_ids=b""), "sent 0 tokens"),
        (set_part(token_ids=bytes(16)), "sent 4 tokens"),
        (set_part(head_ids=bytes(4)), "4 bytes of head_ids"),
        (set_part(draw_ids=bytes(4)), "4 bytes of draw_ids"),
        (set_part(token_ids=struct.pack("<3i", 1, 2, 100)), "token_ids from 1 to 100"),
        (set_part(token_ids=struct.pack("<3i", 1, 2, -1)), "token_ids from -1 to 2"),
        (set_part(token_logprobs=struct.pack("<3f", 0, 0, float("nan"))), "not finite"),
        (set_part(draw_logprobs=struct.pack("<6f", *[float("nan")] * 6)), "NaN"),
        (lambda part: part.versions.pop(), "version spans"),
    ],
)
def test_a_wrong_sampled_part_is_corrupt(
    change: Callable[[rollouts_pb2.SampledPart], object], match: str
) -> None:
    reader = SampledReader(make_order(3, 5, 2), 100)
    (first,), (second,) = (
        list(wire.sampled_parts(index, make_sampled(3, 5, 2))) for index in (0, 1)
    )
    assert reader.add(first) is not None
    change(second)
    with pytest.raises(Corrupt, match=match):
        reader.add(second)
