"""A head that processes share, over gloo: the rows of one process that has the whole head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from protos.errors import Corrupt
from teacher_service.head.scale_and_cap import ScaleAndCap
from teacher_service.head.scoring import ScoredRows, score_hidden
from teacher_service.head.vocabulary_shard import VocabularyShard
from tests.forks import Forks

N, V = 23, 500  # 7 groups of 64 ids, and 52 ids more
CAPPED = ScaleAndCap(0.5, 5.0)


def random_logits() -> Tensor:
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 20] = 100  # a tail that is nothing beside the head
    return logits


def score_both_ways(
    logits: Tensor, vocab_size: int = V, **options: Any
) -> tuple[ScoredRows, ScoredRows]:
    """The rows of this rank's shard, and those of the whole head; about the first ids.

    The states are the logits, and a product is a copy of them: both have the same bits.
    """
    generator = torch.Generator().manual_seed(1)
    options.setdefault("token_ids", torch.randint(vocab_size, (N,), generator=generator))
    common: dict[str, Any] = {"temperature": 0.7, "chunk_rows": 7, "top_k": None, "head_ids": None}
    common |= options
    shard = VocabularyShard(V, dist.get_rank(), dist.get_world_size())
    own_columns, padding = slice(shard.ids.start, shard.ids.stop), shard.width - len(shard.ids)
    of_shard = score_hidden(
        logits,
        torch.empty(shard.width, V),
        product=lambda states: torch.nn.functional.pad(states[:, own_columns], (0, padding)),
        vocabulary=shard.narrow(vocab_size),
        **common,
    )
    full_weights = torch.empty(vocab_size, V)
    copy = score_hidden(logits, full_weights, product=lambda s: s[:, :vocab_size].clone(), **common)
    return of_shard, copy


def assert_same(shard_rows: ScoredRows, full_rows: ScoredRows) -> None:
    assert torch.equal(shard_rows.head_ids, full_rows.head_ids)
    for name in ("head_logprobs", "tail_logmass", "token_logprobs", "draw_logprobs"):
        of_ours, of_whole = getattr(shard_rows, name), getattr(full_rows, name)
        assert (of_ours is None) == (of_whole is None)
        if of_ours is not None:
            torch.testing.assert_close(of_ours, of_whole, rtol=1e-6, atol=1e-6)
    if full_rows.sample_ids is not None and full_rows.sample_logprob is not None:
        assert shard_rows.sample_ids is not None
        some = full_rows.sample_logprob.isfinite()
        assert torch.equal(shard_rows.sample_ids[some], full_rows.sample_ids[some])
        torch.testing.assert_close(
            shard_rows.sample_logprob, full_rows.sample_logprob, rtol=1e-6, atol=1e-6
        )


def the_likeliest_ids() -> None:
    for k in (0, 1, 3, 60, V):
        assert_same(*score_both_ways(random_logits(), top_k=k))


def the_first_ids() -> None:
    """Some of a rank's ids, and none of the last rank's, are left out."""
    for vocab_size in (499, 400, 200, 5):
        assert_same(*score_both_ways(random_logits(), vocab_size, top_k=5))


def chosen_ids_and_draws() -> None:
    generator = torch.Generator().manual_seed(2)
    order = torch.rand(N, V, generator=generator).argsort(1)
    draws = torch.randint(V, (N, 4), generator=generator)
    for k in (0, 6, V):
        options = {"head_ids": order[:, :k], "draw_ids": draws, "scale_and_cap": CAPPED}
        assert_same(*score_both_ways(random_logits(), **options))


def samples_of_the_tail() -> None:
    uniforms = torch.rand(N, 200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    uniforms[:, :2] = torch.tensor([0.0, 1 - 2.0**-53])
    logits = random_logits()
    logits[1, 256:] = -torch.inf  # ranks without mass
    logits[3, :256] = -torch.inf
    for k in (0, 4):
        assert_same(*score_both_ways(logits, top_k=k, uniforms=uniforms))
    assert_same(*score_both_ways(random_logits(), top_k=V, uniforms=uniforms))  # no tail


def a_bad_weight_of_one_rank() -> None:
    """Whatever rank has it, every rank reports the same row; also if it is a head id."""
    for bad in (torch.nan, torch.inf):
        for at in (0, 470):
            logits = random_logits()
            logits[9, at] = bad
            for options in ({"top_k": 3}, {"head_ids": torch.full((N, 1), at)}):
                with pytest.raises(Corrupt, match="position 9"):
                    score_both_ways(logits, **options)


def few_numbers_a_row_are_exchanged() -> None:
    """Those of the ids that a row has: 64 times as many ids in the vocabulary change nothing."""
    k, samples = 6, 4
    uniforms = torch.rand(N, samples, dtype=torch.float64)
    head_ids = torch.arange(k).expand(N, k)
    cases: list[dict[str, Any]] = [
        {"top_k": k, "uniforms": uniforms},
        {"head_ids": head_ids, "draw_ids": torch.full((N, samples), 9), "uniforms": uniforms},
    ]
    gather = dist.all_gather_into_tensor
    for options in cases:
        exchanged_counts = []
        for size in (V, 64 * V):
            count = 0

            def counted(output: Tensor, values: Tensor, **group: Any) -> Any:
                nonlocal count
                count += values.numel()
                return gather(output, values, **group)

            dist.all_gather_into_tensor = counted
            shard = VocabularyShard(size, dist.get_rank(), dist.get_world_size())
            logits = torch.randn(N, shard.width)
            score_hidden(
                logits,
                torch.empty(shard.width, shard.width),
                product=lambda states: states.clone(),
                vocabulary=shard,
                token_ids=torch.zeros(N, dtype=torch.long),
                temperature=0.7,
                chunk_rows=7,
                **({"top_k": None, "head_ids": None} | options),
            )
            exchanged_counts.append(count / N)
        assert exchanged_counts[0] == exchanged_counts[1], exchanged_counts
        # The candidates with their ids, the chosen logits, the draws with their weights, and sums.
        assert exchanged_counts[0] <= 3 * k + 3 * samples + 8, exchanged_counts
    dist.all_gather_into_tensor = gather


CASES = [
    the_likeliest_ids,
    the_first_ids,
    chosen_ids_and_draws,
    samples_of_the_tail,
    a_bad_weight_of_one_rank,
    few_numbers_a_row_are_exchanged,
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_rows_of_the_whole(
    case: Callable[[], None], ranks: int, tmp_path: Path
) -> None:
    """`case` runs in each process, and asserts."""
    assert Forks(ranks, tmp_path / "group", case).wait() == [0] * ranks


@pytest.mark.parametrize("size", [500, 512, 151_936, 151_669])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_have_every_id_once(size: int, ranks: int) -> None:
    shards = [VocabularyShard(size, rank, ranks) for rank in range(ranks)]
    assert [token_id for shard in shards for token_id in shard.ids] == list(range(size))
    assert {shard.width for shard in shards} == {shards[0].width}
    assert shards[0].width < size / ranks + 64
