"""What the tests of pushed weights share: a query, the weights of an engine, a whole push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.teacher.query import ScoreQuery
from protos import teacher_pb2
from protos.rows.codec import RowBlock
from teacher_service.engines.base import ScoringEngineInfo
from teacher_service.engines.hf import HfEngine
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.weights import WeightUpdater

Arrays = dict[str, NDArray[Any]]
Parts = Iterable[teacher_pb2.WeightsPart]
TOKENS = np.random.default_rng(0).integers(0, 90, 30).astype(np.int32)
QUERY = ScoreQuery(TOKENS, 1, top_k=8, f32=True)
NAME = "model.layers.0.self_attn.k_proj.weight"  # the third tensor


def arrays(engine: HfEngine) -> Arrays:
    """The weights as they are served now, in float32."""
    return {name: p.detach().float().numpy().copy() for name, p in parameters(engine).items()}


def parameters(engine: HfEngine) -> dict[str, torch.nn.Parameter]:
    return dict(engine._model.named_parameters())


def rows(engine: HfEngine) -> RowBlock:
    [block] = engine.score([QUERY])
    assert isinstance(block, RowBlock)
    return block


def push(engine: Any, parts: Parts) -> ScoringEngineInfo:
    async def send() -> AsyncIterator[teacher_pb2.WeightsPart]:
        for part in parts:
            yield part

    async def main() -> ScoringEngineInfo:
        async with Batcher(engine, max_batch_tokens=1000) as batcher:
            return await WeightUpdater(engine, batcher).push(send())

    return asyncio.run(main())
