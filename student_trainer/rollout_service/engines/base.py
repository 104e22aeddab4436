"""The interface of a rollout engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from student_trainer.rollout_client.order import InFlight, Order, WeightsVersion
from student_trainer.rollout_client.push.group import Seat
from student_trainer.rollout_client.push.stream import WeightsOffer
from student_trainer.rollouts.sampler import SampledTokens


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself.

    max_length: most tokens of one sequence; None: no limit. in_flight: the values of
    `WeightsVersion.in_flight` that it knows. lora_rank: of the adapters that its snapshots have;
    0: they have all weights. sleeps: `RolloutEngine.sleep` frees memory, and the engine starts so.
    ranks: processes that receive pushed weights.
    """

    name: str
    model: str
    vocab_size: int
    max_length: int | None
    dtype: str
    device: str
    in_flight: tuple[InFlight, ...] = ("drain", "recompute", "keep")
    lora_rank: int = 0
    sleeps: bool = False
    ranks: int = 1


class RolloutEngine(Protocol):
    """Samples sequences with a model whose weights are replaced again and again.

    `service.py` calls it from one event loop. It loads weights only as `WeightsVersion.in_flight`
    allows: with "drain" when no order runs.
    """

    @property
    def info(self) -> EngineInfo:
        """Return the model, its limits, and where it computes."""

    async def load(self, version: WeightsVersion) -> None:
        """Load the weights of a snapshot, and verify them with its probe.

        Orders that run go on with the new weights, after "recompute" with a new KV cache. Raises
        Corrupt if the snapshot is incomplete or damaged, or if the engine's log-probs of the probe
        differ from the trainer's: no order may be sampled then before a later `load` succeeds.
        """

    async def receive(self, offer: WeightsOffer, seat: Seat) -> None:
        """Load weights that come through a process group, and verify them, as `load` does.

        `seat`: of the first process of the engine. Raises Unavailable if the group breaks, and
        Corrupt as `load` does: no order may be sampled then before a later load succeeds.
        """

    def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Yield (index in the order, its tokens) for each sequence as soon as it is finished.

        Closing the iterator ends the sampling. The tokens of a sequence depend only on the weights,
        the seed, its number and its tokens, apart from rounding in the model.
        """

    async def sleep(self) -> None:
        """Free the memory of the GPU until the next `load`; the weights are gone. No order runs."""

    async def close(self) -> None:
        """Stop the engine. Calling it twice is safe."""
