"""A process that samples for ever with the vllm rollout engine.

Arguments: RANKS LORA_RANK MODEL SNAPSHOT..."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from student_trainer.rollout_client.order import (
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine


async def main(ranks: str, lora_rank: str, model: str, *snapshots: str) -> None:
    engine = VllmRolloutEngine(
        model, tensor_parallel_size=int(ranks), lora_rank=int(lora_rank), max_batch_tokens=512
    )
    settings = SamplingSettings(4, 1.0, 0, 0, 500, 1)
    sequences = [SequenceRequest(torch.tensor([number]), number, 500) for number in range(8)]
    for number, directory in enumerate(snapshots):
        version = WeightsVersion("lineage", number, Path(directory))
        print("loading", number, flush=True)
        await engine.load(version)
    print("sampling", flush=True)
    while True:
        async for index, _ in engine.sample(Order(version, settings, sequences)):
            print("sampled", index, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
