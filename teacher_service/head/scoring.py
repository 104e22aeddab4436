"""Computes rows from hidden states in chunks, without a full [N, V] tensor of logits.

The hf and vllm engines share this code. Shapes: N rows, H hidden size, V vocabulary size, K head
ids per row, M tail samples per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from protos.errors import Corrupt
from teacher_service.head.scale_and_cap import PLAIN, ScaleAndCap
from teacher_service.head.vocabulary import WHOLE, Vocabulary

# Bytes of the float32 logits of one GEMM. With fewer rows per GEMM, a GPU would spend its time
# reading the weights.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_CACHE_BYTES = 4 << 20


@dataclass(frozen=True)
class ScoredRows:
    """Rows as tensors; log-probs are float32, in nats, over the full vocabulary.

    - head_ids: int64 [N, K]
    - head_logprobs [N, K], tail_logmass [N], token_logprobs [N]
    - sample_ids: int64 [N, M], the tail samples; None without tail samples
    - sample_logprob: [N], mean log-prob of a row's samples; None without tail samples
    - draw_logprobs: [N, D], log-probs of the ids drawn by the student; None without draws
    """

    head_ids: Tensor
    head_logprobs: Tensor
    tail_logmass: Tensor
    token_logprobs: Tensor
    sample_ids: Tensor | None = None
    sample_logprob: Tensor | None = None
    draw_logprobs: Tensor | None = None


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    product: Callable[[Tensor], Tensor] | None = None,
    scale_and_cap: ScaleAndCap = PLAIN,
    token_ids: Tensor,
    top_k: int | None,
    head_ids: Tensor | None,
    temperature: float,
    uniforms: Tensor | None = None,
    draw_ids: Tensor | None = None,
    chunk_rows: int | None = None,
    first_position: int = 0,
    vocabulary: Vocabulary = WHOLE,
) -> ScoredRows:
    """Return rows of log_softmax(logits / temperature).

    The logits are hidden @ weight.T + bias, after `scale_and_cap`. Give either `top_k` or
    `head_ids`.

    - hidden [N, H], weight [V, H], bias [V], token_ids int64 [N].
    - product: an optional function that computes hidden @ weight.T faster.
    - head_ids: int64 [N, K], without duplicates in a row.
    - uniforms: float64 [N, M] in [0, 1); each uniform draws one id from the tail. If a tail has no
      mass, its sample ids are meaningless and their log-prob is -inf.
    - draw_ids: int64 [N, D], ids whose log-probs are also returned.
    - vocabulary: the ids of the rows of `weight` and `bias`. With a shard, the result still covers
      the ids of all shards.

    Raises Corrupt, naming position `first_position` + row, if a row of logits has a NaN, a +inf or
    no finite entry. Logits of -inf (masked vocabulary) are valid.

    Memory besides the arguments: 12 K + 8 bytes per row, one chunk of logits (64 MiB on a CPU, 96
    MiB for weights in half precision) and a block of 4 MiB. Tail samples add 8 M + 4 bytes per row
    and another block of 4 MiB.
    """
    product = product or (lambda states: _multiply(states, weight))
    size = chunk_rows or max(1, _CHUNK_BYTES[hidden.device.type] // (4 * len(weight)))
    # Allocate the results first. Otherwise, these small tensors would lie between large tensors
    # that are freed, and would fragment the memory.
    k = top_k if head_ids is None else head_ids.shape[1]
    samples, draws = (0 if tensor is None else tensor.shape[1] for tensor in (uniforms, draw_ids))
    rows, normalisers = _allocate_rows(hidden, k, samples, draws)
    next_row = 0
    for first in range(0, len(hidden), size):
        chunk = slice(first, first + size)
        chunk_inputs = (_slice_rows(tensor, chunk) for tensor in (head_ids, uniforms, draw_ids))
        # The logits are not assigned: a variable would keep them alive during the next chunk.
        for block, lse in select(
            _add_bias(product(hidden[chunk]), bias),
            lambda products: vocabulary.mask_(scale_and_cap.apply_(products, temperature)),
            token_ids[chunk],
            vocabulary,
            top_k,
            *chunk_inputs,
        ):
            target_rows = slice(next_row, next_row + len(lse))
            _write_rows(rows, block, target_rows)
            normalisers[target_rows] = lse
            next_row = target_rows.stop
    # One check at the end: a check in every chunk would synchronize the GPU each time.
    _require_finite(normalisers, first_position)
    return rows


def _write_rows(rows: ScoredRows, block: ScoredRows, target_rows: slice) -> None:
    for column in fields(ScoredRows):
        if (values := getattr(block, column.name)) is not None:
            getattr(rows, column.name)[target_rows] = values


def _allocate_rows(
    hidden: Tensor, k: int | None, samples: int, draws: int
) -> tuple[ScoredRows, Tensor]:
    """Allocate the rows of `hidden` and their normalisers [N]."""
    assert k is not None, "a query has either top_k or head_ids"
    n, device = len(hidden), hidden.device
    head_ids = torch.empty(n, k, dtype=torch.int64, device=device)
    head_logprobs = torch.empty(n, k, dtype=torch.float32, device=device)
    tail_logmass, token_logprobs, normalisers = torch.empty(
        3, n, dtype=torch.float32, device=device
    )
    rows = ScoredRows(head_ids, head_logprobs, tail_logmass, token_logprobs)
    if samples:
        sample_ids = torch.empty(n, samples, dtype=torch.int64, device=device)
        rows = replace(rows, sample_ids=sample_ids, sample_logprob=torch.empty_like(tail_logmass))
    if draws:
        draw_logprobs = torch.empty(n, draws, dtype=torch.float32, device=device)
        rows = replace(rows, draw_logprobs=draw_logprobs)
    return rows, normalisers


def select(
    chunk: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    vocabulary: Vocabulary,
    top_k: int | None,
    head_ids: Tensor | None,
    uniforms: Tensor | None = None,
    draw_ids: Tensor | None = None,
) -> Iterator[tuple[ScoredRows, Tensor]]:
    """Yield rows and their normalisers [n], block by block, from products `chunk` [N, V].

    - chunk: the products of the head; they are overwritten.
    - to_logits: a function that overwrites a block of products [n, V] with its logits, divided by
      the temperature.
    - token_ids int64 [N]; top_k, or else head_ids int64 [N, K]; draw_ids int64 [N, D].

    The normaliser of a row is the logsumexp of its logits; it is not finite if the logits are
    invalid.
    """
    next_row = 0
    for products in torch.split(chunk, _count_block_rows(chunk)):
        logits = to_logits(products)
        rows = slice(next_row, next_row + len(logits))
        heads = _find_top_ids(vocabulary, logits, top_k) if head_ids is None else head_ids[rows]
        block_inputs = _slice_rows(uniforms, rows), _slice_rows(draw_ids, rows)
        yield _score_block(logits, heads, token_ids[rows], *block_inputs, vocabulary)
        next_row = rows.stop


def _slice_rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def _count_block_rows(chunk: Tensor) -> int:
    """Return the number of rows per block: on a CPU, as many as fit in its cache."""
    if chunk.is_cuda:
        return len(chunk)
    return max(1, _CACHE_BYTES // (4 * chunk.shape[1]))


def _multiply(hidden: Tensor, weight: Tensor) -> Tensor:
    if weight.is_cuda and weight.dtype is not torch.float32:
        # The GEMM accumulates in float32; rounding the result to bf16 would lose 3 digits.
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden @ weight.t()


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    product = product.float()
    return product if bias is None else product.add_(bias)


def _find_top_ids(vocabulary: Vocabulary, logits: Tensor, top_k: int | None) -> Tensor:
    assert top_k is not None, "a query has either top_k or head_ids"
    return vocabulary.top(logits, top_k)


def _score_block(
    logits: Tensor,
    heads: Tensor,
    token_ids: Tensor,
    uniforms: Tensor | None,
    draw_ids: Tensor | None,
    vocabulary: Vocabulary,
) -> tuple[ScoredRows, Tensor]:
    """Return the rows of one block and the normaliser of each row. Overwrites `logits`.

    The exponentials of the tail are computed once, in place, so that 4 bytes per logit suffice.
    """
    k = heads.shape[1]
    scored_ids = [heads, token_ids[:, None]] + ([] if draw_ids is None else [draw_ids])
    values, max_logits = vocabulary.take_(logits, torch.cat(scored_ids, dim=1), removed=k)
    # The clamp avoids inf - inf in a row where every logit is -inf.
    max_logits = max_logits.clamp_(min=torch.finfo(logits.dtype).min)
    weights = logits.sub_(max_logits[:, None]).exp_()
    # Do not use log(1 - sum of the head): for a small tail, all digits would cancel.
    tail = vocabulary.sum(weights).log_().add_(max_logits)
    lse = torch.logaddexp(torch.logsumexp(values[:, :k], dim=-1), tail)
    logprobs = values - lse[:, None]
    rows = ScoredRows(heads, logprobs[:, :k], tail - lse, logprobs[:, k])
    if draw_ids is not None:
        rows = replace(rows, draw_logprobs=logprobs[:, k + 1 :])
    if uniforms is not None:
        sample_ids, sample_weights = vocabulary.draw(weights, uniforms)
        sample_logprob = sample_weights.log_().mean(-1).add_(max_logits - lse)
        rows = replace(rows, sample_ids=sample_ids, sample_logprob=sample_logprob)
    return rows, lse


def _require_finite(normalisers: Tensor, first_position: int) -> None:
    invalid_rows = torch.nonzero(~torch.isfinite(normalisers))
    if len(invalid_rows):
        position = first_position + int(invalid_rows[0])
        raise Corrupt(
            f"the teacher's logits for position {position} of the sequence are not finite",
            field=f"token_ids[{position}]",
            hint="check the teacher's weights and dtype; float16 overflows earlier than bfloat16",
        )
