"""Converts orders and sampled sequences to messages of protos/rollouts.proto and back.

Messages are validated when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients.teacher.query import MAX_TAIL_DRAWS, MIN_TEMPERATURE
from protos import rollouts_pb2
from protos.errors import Corrupt, InvalidInput
from protos.rpc.transport import MAX_CHUNK_BYTES, MAX_MESSAGE_BYTES
from student_trainer.data.sequence import TailDraws
from student_trainer.rollout_client.order import (
    InFlight,
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollouts.sampler import SampledTokens

MAX_SEQUENCES = 1 << 16
# Maximum number of tokens of an order, given and to be sampled.
MAX_TOKENS = 1 << 28
MAX_TOP_K = 4096
# Random numbers of a rollout: `rollout_noise` generates all of them, 8 bytes each.
MAX_STREAM_TOKENS = 1 << 20
MAX_MARKS = 64
MAX_TEXT_CHARS = 1000
# `rollout_noise` seeds a generator of 64 bits with seed * 1e9 + number.
_SEEDS = 1 << 32
_NUMBERS = 1 << 62
_ENVELOPE_BYTES = 1024

_IN_FLIGHT: dict[InFlight, rollouts_pb2.InFlight.ValueType] = {
    "drain": rollouts_pb2.IN_FLIGHT_DRAIN,
    "recompute": rollouts_pb2.IN_FLIGHT_RECOMPUTE,
    "keep": rollouts_pb2.IN_FLIGHT_KEEP,
}


@dataclass(frozen=True)
class OrderLimits:
    """The limits of an engine.

    - vocab_size: token ids are 0 to vocab_size - 1.
    - max_length: maximum tokens of a sequence, including the sampled tokens; None: no limit.
    - in_flight: the supported values of `WeightsVersion.in_flight`.
    """

    vocab_size: int
    max_length: int | None
    in_flight: Sequence[InFlight]


def order_parts(order: Order) -> list[rollouts_pb2.OrderPart]:
    """Return the messages of an order: first the header, then one message for each sequence.

    Raises InvalidInput if a value does not fit into its message.
    """
    settings = order.settings
    try:
        header = rollouts_pb2.OrderHeader(
            weights=version_message(order.weights),
            top_k=settings.top_k,
            draws=settings.draws,
            temperature=settings.temperature,
            greedy=settings.seed is None,
            seed=settings.seed or 0,
            stream_tokens=settings.stream_tokens,
            marks=settings.marks,
            batch_tokens=settings.batch_tokens,
            sequences=len(order.sequences),
            vocab_size=settings.vocab_size or 0,
            end_ids=settings.end_ids,
        )
        parts = [rollouts_pb2.OrderPart(header=header)]
        for request in order.sequences:
            sequence = rollouts_pb2.SequenceRequest(
                token_ids=request.token_ids.numpy().astype("<i4").tobytes(),
                number=request.number,
                limit=request.limit,
                used=request.used,
            )
            parts.append(rollouts_pb2.OrderPart(sequence=sequence))
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the order cannot be encoded: {error}", field="order") from error
    for index, part in enumerate(parts[1:]):
        if part.ByteSize() > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
            _refuse_field(f"sequences[{index}].token_ids", f"{part.ByteSize()} bytes", "shorten it")
    return parts


def version_message(version: WeightsVersion) -> rollouts_pb2.WeightsVersion:
    """Return the protobuf message of a version of the weights."""
    return rollouts_pb2.WeightsVersion(
        lineage=version.lineage,
        number=version.number,
        directory=str(version.directory.absolute()),
        in_flight=_IN_FLIGHT[version.in_flight],
        job=version.job,
        attempt=version.attempt,
    )


class OrderReader:
    """Reads the messages of one order, and builds the order.

    All errors are InvalidInput with a hint and a field, such as `sequences[3].limit`.
    """

    def __init__(self, limits: OrderLimits) -> None:
        self._limits = limits
        self._header: rollouts_pb2.OrderHeader | None = None
        self._weights: WeightsVersion | None = None
        self._sequences: list[SequenceRequest] = []
        self._tokens = 0

    def add(self, part: rollouts_pb2.OrderPart) -> None:
        """Read the next message."""
        match part.WhichOneof("part"):
            case "header" if self._header is None:
                self._weights = read_version(part.header.weights, self._limits)
                _check_header(part.header, self._limits)
                self._header = part.header
            case "sequence" if self._header is not None:
                self._sequences.append(self._read_sequence(part.sequence, self._header))
            case _:
                _refuse_field("part", "an order is one header, then its sequences", "send them so")

    def order(self) -> Order:
        """Return the complete order. Call this after the last message."""
        header = self._header
        if header is None or self._weights is None:
            _refuse_field("header", "is missing", "send the header of the order first")
        if len(self._sequences) != header.sequences:
            _refuse_field(
                "sequences",
                f"{header.sequences} announced, {len(self._sequences)} received",
                "send as many as the header says",
            )
        settings = SamplingSettings(
            top_k=header.top_k,
            temperature=header.temperature,
            draws=header.draws,
            seed=None if header.greedy else header.seed,
            stream_tokens=header.stream_tokens,
            batch_tokens=header.batch_tokens,
            marks=tuple(header.marks),
            vocab_size=header.vocab_size or None,
            end_ids=tuple(header.end_ids),
        )
        return Order(self._weights, settings, self._sequences)

    def _read_sequence(
        self, request: rollouts_pb2.SequenceRequest, header: rollouts_pb2.OrderHeader
    ) -> SequenceRequest:
        field = f"sequences[{len(self._sequences)}]"
        if len(self._sequences) == header.sequences:
            _refuse_field(
                field, f"only {header.sequences} were announced", "set the count in the header"
            )
        if len(request.token_ids) % 4 or not request.token_ids:
            size = len(request.token_ids)
            _refuse_field(
                f"{field}.token_ids", f"{size} bytes", "send at least one little-endian int32"
            )
        ids = np.frombuffer(request.token_ids, "<i4")
        invalid_positions = np.flatnonzero((ids < 0) | (ids >= self._limits.vocab_size))
        if invalid_positions.size:
            _refuse_field(
                f"{field}.token_ids[{invalid_positions[0]}]",
                f"must be 0 to {self._limits.vocab_size - 1}, got {ids[invalid_positions[0]]}",
                "start the rollout service with the student's model",
            )
        length, limit = len(ids) + request.limit, self._limits.max_length
        if not request.limit or (limit is not None and length > limit):
            _refuse_field(
                f"{field}.limit",
                f"{request.limit} tokens to sample after {len(ids)}; at least 1 is needed, and a"
                f" sequence has at most {'any number of' if limit is None else limit} tokens",
                "sample fewer tokens, or shorten the prompts",
            )
        if not header.greedy and request.used + request.limit > header.stream_tokens:
            _refuse_field(
                f"{field}.used",
                f"{request.used} + {request.limit} tokens, but the rollout has"
                f" {header.stream_tokens} random numbers",
                "raise stream_tokens",
            )
        if not -_NUMBERS <= request.number < _NUMBERS:
            _refuse_field(f"{field}.number", f"got {request.number}", "use -2^62 to 2^62 - 1")
        self._tokens += length
        if self._tokens > MAX_TOKENS:
            _refuse_field(
                field,
                f"an order has at most {MAX_TOKENS} tokens, given and sampled together",
                "divide the order into several orders",
            )
        token_ids = torch.from_numpy(ids.astype(np.int64))
        return SequenceRequest(token_ids, request.number, request.limit, request.used)


def read_version(message: rollouts_pb2.WeightsVersion, limits: OrderLimits) -> WeightsVersion:
    """Return the version that a message contains. Raises InvalidInput."""
    if not 0 < len(message.lineage) <= MAX_TEXT_CHARS:
        hint = "name the trainer's attempt"
        _refuse_field("weights.lineage", f"must be 1 to {MAX_TEXT_CHARS} characters", hint)
    if len(message.job) > MAX_TEXT_CHARS:
        _refuse_field("weights.job", f"must be at most {MAX_TEXT_CHARS} characters", "shorten it")
    directory = message.directory
    if not 0 < len(directory) <= 4 * MAX_TEXT_CHARS or not Path(directory).is_absolute():
        _refuse_field(
            "weights.directory", "is not an absolute path", "give the snapshot's full path"
        )
    in_flight = next(
        (mode for mode, value in _IN_FLIGHT.items() if value == message.in_flight), None
    )
    if in_flight is None or in_flight not in limits.in_flight:
        known_modes = " or ".join(limits.in_flight)
        description = in_flight or f"value {message.in_flight}"
        _refuse_field(
            "weights.in_flight",
            f"this engine knows {known_modes}, got {description}",
            f"use {known_modes}, or a service with --engine vllm",
        )
    return WeightsVersion(
        message.lineage,
        message.number,
        Path(directory),
        in_flight,
        message.job,
        message.attempt,
    )


def _check_header(header: rollouts_pb2.OrderHeader, limits: OrderLimits) -> None:
    max_top_k = min(MAX_TOP_K, header.vocab_size or limits.vocab_size)
    bounds = [
        ("vocab_size", header.vocab_size, 0, limits.vocab_size),
        ("top_k", header.top_k, 0, max_top_k),
        ("draws", header.draws, 0, MAX_TAIL_DRAWS),
        ("seed", header.seed, 0, _SEEDS - 1),
        ("stream_tokens", header.stream_tokens, 0 if header.greedy else 1, MAX_STREAM_TOKENS),
        ("batch_tokens", header.batch_tokens, 1, MAX_TOKENS),
        ("sequences", header.sequences, 1, MAX_SEQUENCES),
    ]
    bounds += [("end_ids", end, 0, limits.vocab_size - 1) for end in header.end_ids]
    for name, value, minimum, maximum in bounds:
        if not minimum <= value <= maximum:
            hint = "divide the order" if name == "sequences" else f"set {name} in this range"
            _refuse_field(name, f"must be {minimum} to {maximum}, got {value}", hint)
    if not MIN_TEMPERATURE <= header.temperature < math.inf:
        message = f"must be finite and at least {MIN_TEMPERATURE}, got {header.temperature:g}"
        _refuse_field("temperature", message, "use 1.0")
    has_bad_mark = any(not 0 < len(text) <= MAX_TEXT_CHARS for text in header.marks)
    if has_bad_mark or len(header.marks) > MAX_MARKS:
        message = f"at most {MAX_MARKS} texts of 1 to {MAX_TEXT_CHARS} characters"
        _refuse_field("marks", message, "use fewer or shorter marks")


def sampled_parts(index: int, sampled: SampledTokens) -> Iterator[rollouts_pb2.SampledPart]:
    """Yield the messages of one sampled sequence, at most 1 MiB each.

    `index`: the index of the sequence in its order.
    """
    draws = sampled.draws
    columns: dict[str, NDArray[Any]] = {
        "token_ids": _to_array(sampled.token_ids, "<i4"),
        "head_ids": _to_array(sampled.head_ids, "<i4"),
        "token_logprobs": _to_array(sampled.token_logprobs, "<f4"),
    }
    if draws is not None:
        columns["draw_ids"] = _to_array(draws.ids, "<i4")
        columns["draw_logprobs"] = _to_array(draws.logprobs, "<f4")
    tokens = len(sampled.token_ids)
    row_bytes = sum(column.nbytes for column in columns.values()) // tokens
    rows = max(1, (MAX_CHUNK_BYTES - _ENVELOPE_BYTES) // row_bytes)
    for first in range(0, tokens, rows):
        part = rollouts_pb2.SampledPart(index=index, first=first)
        for name, column in columns.items():
            setattr(part, name, column[first : first + rows].tobytes())
        if first + rows >= tokens:
            part.last, part.ended, part.closed = True, sampled.ended, sampled.closed
            part.versions.extend(
                rollouts_pb2.VersionSpan(version=version, tokens=count)
                for version, count in sampled.versions
            )
        yield part


class SampledReader:
    """Builds the sampled sequences of one order from their messages. All errors are Corrupt.

    vocab_size: number of the student's ids; None: ids are not checked.
    """

    def __init__(self, order: Order, vocab_size: int | None) -> None:
        settings = order.settings
        self._vocab_size = vocab_size
        self._limits = [request.limit for request in order.sequences]
        self._top_k = settings.top_k
        self._draws = 0 if settings.seed is None else settings.draws
        self._parts: dict[int, list[rollouts_pb2.SampledPart]] = {}
        self._finished: set[int] = set()

    @property
    def complete(self) -> bool:
        """True if all sequences of the order are complete."""
        return len(self._finished) == len(self._limits)

    def add(self, part: rollouts_pb2.SampledPart) -> tuple[int, SampledTokens] | None:
        """Read a message. If it completes a sequence, return (index in the order, tokens)."""
        index = part.index
        if index >= len(self._limits) or index in self._finished:
            raise Corrupt(f"the rollout service sent sequence {index} twice or without a request")
        parts = self._parts.setdefault(index, [])
        received_tokens = sum(len(earlier_part.token_ids) for earlier_part in parts) // 4
        tokens = len(part.token_ids) // 4
        if part.first != received_tokens or not 0 < tokens <= self._limits[index] - received_tokens:
            raise Corrupt(
                f"the rollout service sent {tokens} tokens of sequence {index} from position"
                f" {part.first}, after {received_tokens} received tokens; the maximum is"
                f" {self._limits[index]} tokens"
            )
        sizes = {
            "token_ids": 4,
            "head_ids": 4 * self._top_k,
            "token_logprobs": 4,
            "draw_ids": 4 * self._draws,
            "draw_logprobs": 4 * self._draws,
        }
        for name, size in sizes.items():
            if len(getattr(part, name)) != tokens * size:
                raise Corrupt(
                    f"the rollout service sent {len(getattr(part, name))} bytes of {name} for"
                    f" {tokens} tokens, expected {tokens * size}"
                )
        parts.append(part)
        if not part.last:
            return None
        self._finished.add(index)
        return index, self._join_parts(self._parts.pop(index))

    def _join_parts(self, parts: Sequence[rollouts_pb2.SampledPart]) -> SampledTokens:
        final_part = parts[-1]
        token_ids = self._join_ids(parts, "token_ids")
        logprobs = _join_floats(parts, "token_logprobs")
        versions = tuple((span.version, span.tokens) for span in final_part.versions)
        if not np.isfinite(logprobs).all():
            raise Corrupt(f"the log-probs of sampled sequence {final_part.index} are not finite")
        if sum(tokens for _, tokens in versions) != len(token_ids):
            raise Corrupt(
                f"the version spans of sequence {final_part.index} do not cover its tokens"
            )
        draws = None
        if self._draws:
            shape = (len(token_ids), self._draws)
            draw_logprobs = _join_floats(parts, "draw_logprobs")
            if np.isnan(draw_logprobs).any():
                raise Corrupt(f"the draws of sampled sequence {final_part.index} have log-prob NaN")
            ids = self._join_ids(parts, "draw_ids").view(shape)
            draws = TailDraws(ids, torch.from_numpy(draw_logprobs).view(shape))
        return SampledTokens(
            token_ids.long(),
            self._join_ids(parts, "head_ids").view(len(token_ids), self._top_k),
            torch.from_numpy(logprobs),
            final_part.ended,
            final_part.closed,
            draws,
            versions,
        )

    def _join_ids(self, parts: Sequence[rollouts_pb2.SampledPart], name: str) -> Tensor:
        ids = np.concatenate([np.frombuffer(getattr(part, name), "<i4") for part in parts])
        vocab_limit = math.inf if self._vocab_size is None else self._vocab_size
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_limit:
            raise Corrupt(
                f"the rollout service sent {name} from {ids.min()} to {ids.max()}, but the"
                f" student has {self._vocab_size or 'no negative'} ids"
            )
        return torch.from_numpy(ids.astype(np.int32, copy=False))


def _join_floats(parts: Sequence[rollouts_pb2.SampledPart], name: str) -> NDArray[np.float32]:
    values = np.concatenate([np.frombuffer(getattr(part, name), "<f4") for part in parts])
    return values.astype(np.float32, copy=False)


def _to_array(tensor: Tensor, dtype: str) -> NDArray[Any]:
    return tensor.numpy().astype(dtype, copy=False)


def _refuse_field(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidInput(message, field=field, hint=hint)
