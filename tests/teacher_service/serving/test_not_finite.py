"""T12: logits that are no numbers at one position of one sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clients.teacher.query import ScoreQuery, request_of
from protos import teacher_pb2
from protos.errors import Corrupt, DistillError
from teacher_service.cache.row_cache import RowCache
from teacher_service.engines.hf import HfEngine
from teacher_service.metrics import TeacherMetrics
from teacher_service.serving.batcher import Batcher
from teacher_service.serving.scorer import RowScorer
from teacher_service.serving.service import TeacherServicer
from teacher_service.serving.validation import RequestLimits
from teacher_service.serving.weights import WeightUpdater

POISONED, POSITION = 42, 7


def poison(engine: HfEngine) -> Any:
    """The last layer gives a NaN at POSITION - 1 of a sequence that begins with POISONED."""
    begins: list[torch.Tensor] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        begins[:] = [kwargs["input_ids"][:, 0]]

    def spoil(_: Any, args: Any, states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[begins[0] == POISONED, POSITION - 1, 3] = torch.nan
        return states

    base = engine._model.base_model
    base.register_forward_pre_hook(look, with_kwargs=True)
    return base.norm.register_forward_hook(spoil)


def test_one_position_fails_its_sequence_only(tiny_model: Path) -> None:
    engine = HfEngine(str(tiny_model), device="cpu")
    hook = poison(engine)
    metrics = TeacherMetrics()
    cache = RowCache(memory_bytes=1 << 20)
    tokens = np.random.default_rng(0).integers(0, 40, (5, 20)).astype(np.int32)
    tokens[2, 0] = POISONED
    requests = [request_of(ScoreQuery(row, 2, top_k=4), str(n)) for n, row in enumerate(tokens)]

    async def main() -> None:
        async with Batcher(engine, max_batch_tokens=1000, metrics=metrics) as batcher:
            limits = RequestLimits(engine.info.vocab_size, 100, 90)
            scorer = RowScorer(batcher, cache)
            weights = WeightUpdater(engine, batcher)
            servicer = TeacherServicer(scorer, batcher, weights, limits, metrics)

            async def ask(request: teacher_pb2.ScoreRequest) -> int | DistillError:
                try:
                    return sum([chunk.count async for chunk in servicer._answer(request)])
                except DistillError as fault:
                    return fault

            answers = await asyncio.gather(*map(ask, requests))
            assert metrics.read_total("forward_seconds_count") == 1, "they were to share a batch"
            fault = answers[2]
            assert isinstance(fault, Corrupt)
            assert fault.field == f"token_ids[{POSITION}]"
            assert f"position {POSITION} " in fault.message
            assert [n for n in answers if n == 18] == [18] * 4
            assert metrics.read_total("requests_total", code="DATA_LOSS") == 1
            assert metrics.read_total("requests_total", code="OK") == 4
            hook.remove()
            # Not kept: asked again, it is scored again, and right this time.
            assert await asyncio.gather(*map(ask, requests)) == [18] * 5
            assert scorer.tiers()["memory"][0] == 4
            assert metrics.read_total("forward_seconds_count") == 2

    asyncio.run(main())
