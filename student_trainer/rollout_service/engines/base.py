"""The interface of a rollout engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from student_trainer.rollout_client.order import InFlight, Order, WeightsVersion
from student_trainer.rollouts.sampler import SampledTokens


@dataclass(frozen=True)
class RolloutEngineInfo:
    """The model, the limits and the supported features of an engine.

    - max_length: maximum tokens of one sequence; None: no limit.
    - in_flight: the supported values of `WeightsVersion.in_flight`.
    - lora_rank: rank of the adapters that snapshots contain; 0: snapshots contain all weights.
    - sleeps: True if `RolloutEngine.sleep` frees memory. The engine is then asleep when it starts.
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


class RolloutEngine(Protocol):
    """Samples sequences with a model whose weights are replaced again and again.

    `service.py` calls the engine from one event loop. It loads weights only when
    `WeightsVersion.in_flight` allows it: with "drain", only when no order runs.
    """

    @property
    def info(self) -> RolloutEngineInfo:
        """Return the properties of the engine: its model, its limits and its device."""

    async def load(self, version: WeightsVersion) -> None:
        """Load the weights of a snapshot, and verify them with its probe.

        1. The engine replaces its weights. If orders (requests to sample, see `Order`) run, the
           engine pauses the orders first.
        2. Paused orders continue with the new weights. If `version.in_flight` is "recompute", the
           engine first computes their KV cache again; if it is "keep", the cache is unchanged.
        3. The engine scores the probe: token ids with the log-probs that the trainer computed.

        Raises Corrupt if the snapshot is incomplete or damaged, or if the engine's log-probs of the
        probe differ from the trainer's. After an error, the engine refuses to sample new orders
        until a later `load` succeeds.
        """

    def sample(self, order: Order) -> AsyncGenerator[tuple[int, SampledTokens], None]:
        """Yield (index in the order, sampled tokens) for each sequence when it is finished.

        If the caller closes the iterator, sampling ends. The tokens of a sequence depend only on
        the weights, the seed, the rollout number and the given tokens, except for rounding in the
        model.
        """

    async def sleep(self) -> None:
        """Free the GPU memory, including the weights, until the next `load`.

        No order may run.
        """

    async def close(self) -> None:
        """Stop the engine. May be called twice."""
