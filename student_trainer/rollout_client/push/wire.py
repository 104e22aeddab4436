"""Offers and starts of a push as messages of protos/rollouts.proto, validated on arrival."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast, get_args

import numpy as np
import torch

from protos import rollouts_pb2
from protos.errors import InvalidInput
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.push.group import Backend, Seat
from student_trainer.rollout_client.push.stream import WeightsOffer, WeightSpec
from student_trainer.rollout_client.snapshot import Probe
from student_trainer.rollout_client.wire import OrderLimits, read_version, version_message

_HINT = "use the trainer of this version of distill-service"


def offer_message(offer: WeightsOffer) -> rollouts_pb2.PushPart:
    """Return the message of an offer."""
    probe = offer.probe
    message = rollouts_pb2.PushOffer(
        weights=version_message(offer.version),
        dtype=offer.dtype,
        tensors=[rollouts_pb2.PushedWeight(**asdict(weight)) for weight in offer.weights],
        probe_sequences=len(probe.token_ids),
        probe_ids=probe.token_ids.numpy().astype("<i4").tobytes(),
        probe_logprobs=probe.logprobs.numpy().astype("<f4").tobytes(),
    )
    return rollouts_pb2.PushPart(offer=message)


def read_offer(part: rollouts_pb2.PushPart, limits: OrderLimits) -> WeightsOffer:
    """Return the offer of a message. Raises InvalidInput."""
    if part.WhichOneof("part") != "offer":
        raise InvalidInput("a push begins with its offer", field="part", hint=_HINT)
    message = part.offer
    version: WeightsVersion = read_version(message.weights, limits)
    weights = [
        WeightSpec(weight.name, weight.dtype, tuple(weight.shape)) for weight in message.tensors
    ]
    if message.dtype not in ("float32", "bfloat16") or not weights:
        raise InvalidInput("the offer has no dtype or no weights", field="offer", hint=_HINT)
    for weight in weights:
        if not isinstance(getattr(torch, weight.dtype, None), torch.dtype):
            raise InvalidInput(f"has dtype {weight.dtype!r}", field=weight.name, hint=_HINT)
    try:
        ids = np.frombuffer(message.probe_ids, "<i4").reshape(message.probe_sequences, -1)
        logprobs = np.frombuffer(message.probe_logprobs, "<f4").reshape(len(ids), ids.shape[1] - 1)
    except ValueError as error:
        raise InvalidInput(f"the probe is damaged: {error}", field="offer", hint=_HINT) from error
    if not ids.size or ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise InvalidInput("the probe has ids that the engine has not", field="offer", hint=_HINT)
    probe = Probe(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.copy()))
    return WeightsOffer(version, message.dtype, weights, probe)


def start_message(seat: Seat) -> rollouts_pb2.PushPart:
    """Return the message of an engine's first seat."""
    values = asdict(seat)
    rank = values.pop("rank")
    return rollouts_pb2.PushPart(start=rollouts_pb2.PushStart(**values, first_rank=rank))


def read_start(part: rollouts_pb2.PushPart) -> Seat:
    """Return the seat of a message. Raises InvalidInput."""
    start = part.start
    is_seat = 0 < start.first_rank < start.size and 0 < start.port < 1 << 16
    if not is_seat or start.seconds <= 0 or not start.bucket_bytes:
        raise InvalidInput("after its offer, a push starts with a seat", field="part", hint=_HINT)
    if start.backend not in get_args(Backend):
        raise InvalidInput(f"got {start.backend!r}", field="start.backend", hint=_HINT)
    return Seat(
        start.group,
        cast(Backend, start.backend),
        start.host,
        start.port,
        start.size,
        start.first_rank,
        start.seconds,
        start.bucket_bytes,
        start.memory,
    )
