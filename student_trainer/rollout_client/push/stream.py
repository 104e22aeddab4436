"""Weights as a stream of buckets through a process group.

Both sides know the names, dtypes and shapes, and divide them alike: a bucket has consecutive
weights of at most `bucket_bytes` in all, each at a multiple of 16 bytes; a larger weight is alone.
After each bucket come two words: its number, and a checksum of its bytes.
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

_ALIGNED = 16
_COLUMNS = 1024  # of the words of a bucket, for its checksum


@dataclass(frozen=True)
class WeightSpec:
    """A weight without its data. dtype: as torch names it, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, weight: Tensor) -> WeightSpec:
        """Return the spec of a weight, which may be without data (device meta)."""
        return WeightSpec(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class WeightsOffer:
    """A version that is to be pushed. dtype: of the trainer's computation. weights: in order."""

    version: WeightsVersion
    dtype: str
    weights: Sequence[WeightSpec]
    probe: Probe


def buckets(weights: Sequence[WeightSpec], bucket_bytes: int) -> Iterator[list[WeightSpec]]:
    """Yield the weights of each bucket."""
    bucket: list[WeightSpec] = []
    size = 0
    for weight in weights:
        needed = _aligned(weight.nbytes)
        if bucket and size + needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += needed
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
        self._left = buckets(weights, bucket_bytes)
        self._bucket = next(self._left)
        self._broadcast = broadcast
        self._device = device
        self._packed: Tensor | None = None  # used again for every bucket
        self._most = bucket_bytes
        self._held: list[Tensor] = []
        self._sent = 0

    def send(self, name: str, weight: Tensor) -> None:
        """Send the next weight, with the last one of its bucket."""
        assert WeightSpec.of(name, weight) == self._bucket[len(self._held)], name
        self._held.append(weight.detach().to(self._device).contiguous())
        if len(self._held) == len(self._bucket):
            data = self._pack()
            self._broadcast(data)
            self._broadcast(_words(self._sent, data))
            failpoint("bucket-sent")
            self._sent += 1
            self._held = []
            self._bucket = next(self._left, [])

    def _pack(self) -> Tensor:
        if len(self._held) == 1:
            return self._held[0].view(-1).view(torch.uint8)
        if self._packed is None:
            self._packed = torch.zeros(self._most, dtype=torch.uint8, device=self._device)
        place = 0
        for weight in self._held:
            data = weight.view(-1).view(torch.uint8)
            self._packed[place : place + data.numel()].copy_(data)
            place += _aligned(data.numel())
        return self._packed[:place]


def received(
    weights: Sequence[WeightSpec], bucket_bytes: int, device: torch.device, broadcast: Broadcast
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of weights that a `WeightSender` sends; a bucket's share its memory.

    Raises GroupBroken, also if a checksum does not match.
    """
    for number, bucket in enumerate(buckets(weights, bucket_bytes)):
        alone = len(bucket) == 1
        size = bucket[0].nbytes if alone else sum(_aligned(one.nbytes) for one in bucket)
        data = torch.empty(size, dtype=torch.uint8, device=device)
        broadcast(data)
        words = torch.zeros(2, dtype=torch.int64, device=device)
        broadcast(words)
        if not torch.equal(words, _words(number, data)):
            raise GroupBroken(f"the checksum of bucket {number} does not match")
        failpoint("bucket-received")
        place = 0
        for one in bucket:
            flat = data[place : place + one.nbytes].view(one.torch_dtype)
            yield one.name, flat.view(one.shape)
            place += _aligned(one.nbytes)


def _words(number: int, data: Tensor) -> Tensor:
    """Return the number and the checksum of a bucket, int64 [2] on its device.

    The checksum is a sum of the data as words, each times the odd number of its column, modulo
    2^64: it changes with any one word, and with words that are in another column.
    """
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    columns = data[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    rest = data[whole:].long()
    odd = torch.arange(1, 16 * _COLUMNS, 2, device=data.device)
    total = (columns * odd[:_COLUMNS]).sum() + (rest * odd[: rest.numel()]).sum()
    return torch.stack([torch.full_like(total, number), total])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
