"""The stores of the benchmark return the stored rows; DistillKit's layout is as published."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.wire import cache
from benchmarks.wire.distillkit_layout import BUDGET, RECOMMENDED, Layout, compress, decompress
from protos.rows.codec import RowBlock


def rows(n: int, k: int) -> RowBlock:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(151_936, k, replace=False) for _ in range(n)]).astype(np.int32)
    logprobs = np.sort(-rng.random((n, k)) * 9 - 1)[:, ::-1].astype(np.float32).copy()
    logprobs_of_tokens = np.full(n, -3, np.float32)
    return RowBlock(ids, logprobs, logprobs_of_tokens, logprobs_of_tokens)


def test_every_store_gives_back_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LENGTH", 32)
    with cache.open_stores() as stores:
        for name, store in stores.items():
            k = RECOMMENDED.k if "DistillKit" in name else 64
            block = cache.head_of(rows(64, 128), k)
            blocks = [block.slice(0, 32), block.slice(32, 64)]
            assert store.write(blocks) > 0
            cache.require_equal(name, blocks[::-1], store.read([1, 0]))


def test_the_comparison_sees_another_row() -> None:
    block = rows(8, 16)
    ids, logprobs = block.head_ids, block.head_logprobs
    assert ids is not None
    cache.require_equal("same", [block], [(ids, logprobs)])
    for stored_arrays in ((ids[::-1], logprobs), (ids, logprobs - 0.1)):
        with pytest.raises(AssertionError, match="broken"):
            cache.require_equal("broken", [block], [stored_arrays])


@pytest.mark.parametrize(("layout", "size"), [(RECOMMENDED, 344), (BUDGET, 127)])
def test_the_layout_has_the_published_size_and_the_best_fit(layout: Layout, size: int) -> None:
    block = rows(20, layout.k)
    assert block.head_ids is not None
    values, packed = compress(layout, block.head_ids, block.head_logprobs)
    assert values.shape[1] + packed.shape[1] == size
    ids, logprobs = decompress(layout, values, packed)
    np.testing.assert_array_equal(ids, block.head_ids)
    exact = block.head_logprobs[:, : layout.exact]
    np.testing.assert_allclose(logprobs[:, : layout.exact], exact, rtol=2**-8)
    for row in range(20):
        tail = block.head_logprobs[row, layout.exact :].astype(np.float64)
        fit, *_ = np.linalg.lstsq(layout.terms, tail, rcond=None)
        np.testing.assert_allclose(logprobs[row, layout.exact :], layout.terms @ fit, atol=2e-2)


def test_heads_keep_all_of_the_mass() -> None:
    block = cache.head_of(rows(8, 128), 16)
    mass = np.exp(block.head_logprobs).sum(1) + np.exp(block.tail_logmass)
    before = rows(8, 128)
    np.testing.assert_allclose(
        mass, np.exp(before.head_logprobs).sum(1) + np.exp(before.tail_logmass), rtol=1e-5
    )
