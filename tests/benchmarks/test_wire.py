"""The formats of the wire benchmark are lossless, and the codec has the documented size."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from protos.rows.codec import RowBlock

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("orjson", "fastapi", "uvicorn")),
    reason="the peers' wires need pip install -e '.[bench]'",
)


def rows(n: int, k: int) -> RowBlock:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(151_936, k, replace=False) for _ in range(n)]).astype(np.int32)
    logprobs = np.sort(-rng.random((n, k)) * 20)[:, ::-1].astype(np.float32).copy()
    zeros = np.zeros(n, np.float32)
    return RowBlock(ids, logprobs, zeros, zeros)


def test_every_format_gives_back_what_it_got() -> None:
    from benchmarks.wire.benchmark import require_equal
    from benchmarks.wire.formats import FORMATS

    block = rows(20, 16)
    for name, wire in FORMATS.items():
        require_equal(name, block, wire.decode(wire.encode(wire.hold(block))))


def test_the_comparison_sees_a_lost_number() -> None:
    from benchmarks.wire.benchmark import require_equal

    block = rows(20, 16)
    ids: Any = block.head_ids
    changed_logprobs = block.head_logprobs.copy()
    changed_logprobs[3, 4] -= 0.1
    with pytest.raises(AssertionError, match="broken"):
        require_equal("broken", block, (ids, changed_logprobs))
    with pytest.raises(AssertionError, match="broken"):
        require_equal("broken", block, (ids[::-1], block.head_logprobs))


def test_bytes_of_a_message() -> None:
    from benchmarks.wire.benchmark import message_bytes

    bytes_by_case = message_bytes(rows(512, 64))
    assert bytes_by_case["teacher's ids, 64 a message"] <= 284
    assert bytes_by_case["student's ids, 512 a message"] <= 137
