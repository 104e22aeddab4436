"""Weights as a stream of buckets through a process group.

Both sides know the names, dtypes and shapes, and divide them equally: a bucket has consecutive
weights of at most `bucket_bytes` in total, each at a multiple of 16 bytes; a larger weight has a
bucket of its own. After each bucket come two words: its number, and a checksum of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from protos.rpc.failpoints import failpoint
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.push.group import GroupBroken
from student_trainer.rollout_client.snapshot import Probe

# Broadcasts a tensor of rank 0 to all members, in place.
Broadcast = Callable[[Tensor], None]

_ALIGNMENT = 16
_COLUMNS = 1024  # columns of a bucket's words, for its checksum


@dataclass(frozen=True)
class WeightSpec:
    """A weight without its data. dtype: torch's name, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def describe(name: str, weight: Tensor) -> WeightSpec:
        """Return the spec of a weight, which may be without data (device meta)."""
        return WeightSpec(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class WeightsOffer:
    """A version to push. dtype: of the trainer's computation. weights: in the order of sending."""

    version: WeightsVersion
    dtype: str
    weights: Sequence[WeightSpec]
    probe: Probe


def buckets(weights: Sequence[WeightSpec], bucket_bytes: int) -> Iterator[list[WeightSpec]]:
    """Yield the weights of each bucket."""
    bucket: list[WeightSpec] = []
    size = 0
    for weight in weights:
        aligned_bytes = _round_up(weight.nbytes)
        if bucket and size + aligned_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += aligned_bytes
    if bucket:
        yield bucket


class WeightSender:
    """Sends weights in the order of their specs. Not thread-safe."""

    def __init__(
        self,
        weights: Sequence[WeightSpec],
        bucket_bytes: int,
        device: torch.device,
        broadcast: Broadcast,
    ) -> None:
        self._remaining_buckets = buckets(weights, bucket_bytes)
        self._bucket = next(self._remaining_buckets)
        self._broadcast = broadcast
        self._device = device
        self._pack_buffer: Tensor | None = None  # used again for every bucket
        self._bucket_bytes = bucket_bytes
        self._pending_weights: list[Tensor] = []
        self._sent_buckets = 0

    def send(self, name: str, weight: Tensor) -> None:
        """Queue the next weight; the last one of a bucket sends the bucket."""
        assert WeightSpec.describe(name, weight) == self._bucket[len(self._pending_weights)], name
        self._pending_weights.append(weight.detach().to(self._device).contiguous())
        if len(self._pending_weights) == len(self._bucket):
            data = self._pack_bucket()
            self._broadcast(data)
            self._broadcast(_checksum_words(self._sent_buckets, data))
            failpoint("bucket-sent")
            self._sent_buckets += 1
            self._pending_weights = []
            self._bucket = next(self._remaining_buckets, [])

    def _pack_bucket(self) -> Tensor:
        if len(self._pending_weights) == 1:
            return self._pending_weights[0].view(-1).view(torch.uint8)
        if self._pack_buffer is None:
            self._pack_buffer = torch.zeros(
                self._bucket_bytes, dtype=torch.uint8, device=self._device
            )
        offset = 0
        for weight in self._pending_weights:
            data = weight.view(-1).view(torch.uint8)
            self._pack_buffer[offset : offset + data.numel()].copy_(data)
            offset += _round_up(data.numel())
        return self._pack_buffer[:offset]


def receive_weights(
    weights: Sequence[WeightSpec], bucket_bytes: int, device: torch.device, broadcast: Broadcast
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of weights that a `WeightSender` sends; they share a bucket's memory.

    Raises GroupBroken, also if a checksum does not match.
    """
    for number, bucket in enumerate(buckets(weights, bucket_bytes)):
        is_single = len(bucket) == 1
        size = bucket[0].nbytes if is_single else sum(_round_up(weight.nbytes) for weight in bucket)
        data = torch.empty(size, dtype=torch.uint8, device=device)
        broadcast(data)
        words = torch.zeros(2, dtype=torch.int64, device=device)
        broadcast(words)
        if not torch.equal(words, _checksum_words(number, data)):
            raise GroupBroken(f"the checksum of bucket {number} does not match")
        failpoint("bucket-received")
        offset = 0
        for weight in bucket:
            flat = data[offset : offset + weight.nbytes].view(weight.torch_dtype)
            yield weight.name, flat.view(weight.shape)
            offset += _round_up(weight.nbytes)


def _checksum_words(number: int, data: Tensor) -> Tensor:
    """Return the number and the checksum of a bucket, int64 [2] on its device.

    The checksum is the sum of the data's words, each times the odd number of its column, modulo
    2^64: it changes if any single word changes, or if words change their columns.
    """
    if data.storage_offset() % 8:
        data = data.clone()
    column_bytes = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    columns = data[:column_bytes].view(torch.int64).view(-1, _COLUMNS).sum(0)
    remaining_bytes = data[column_bytes:].long()
    odd_numbers = torch.arange(1, 16 * _COLUMNS, 2, device=data.device)
    total = (columns * odd_numbers[:_COLUMNS]).sum() + (
        remaining_bytes * odd_numbers[: remaining_bytes.numel()]
    ).sum()
    return torch.stack([torch.full_like(total, number), total])


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
