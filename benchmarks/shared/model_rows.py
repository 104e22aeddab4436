"""Rows of a small trained model with a vocabulary of 151,936, for benchmarks of codecs and caches.

No model hub is needed: a byte-pair tokenizer and a two-layer Qwen3 are trained for a minute on the
Python sources of this environment, and then score held-out sources. Random weights would not do,
because uniformly distributed ids cannot be compressed. The rows are cached for later runs.

    python -m benchmarks.shared.model_rows    make the rows and print their statistics
"""

from __future__ import annotations

import itertools
import math
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

from protos.rows.codec import RowBlock, decode_rows, encode_rows

VOCAB = 151_936
_MAX_BYTES = 1 << 30  # of the rows
HEAD = 128
ROWS = 4096
_TOKENIZER_CHARS, _TRAINING_CHARS = 64 << 20, 10 << 20
_LENGTH, _BATCH, _STEPS, _NEGATIVES = 128, 16, 200, 4096
_CACHE = Path(tempfile.gettempdir()) / f"distill-benchmark-rows-{VOCAB}-{HEAD}-{ROWS}.bin"


def model_rows() -> RowBlock:
    """Return ROWS rows with HEAD head ids and float32 log-probs; make them on the first call."""
    if not _CACHE.exists():
        _CACHE.write_bytes(encode_rows(_make_rows(), f32=True))
    return decode_rows(_CACHE.read_bytes(), _MAX_BYTES)


def _make_rows() -> RowBlock:
    torch.manual_seed(0)
    texts = _load_sources()
    tokenizer = _train_tokenizer(texts)
    held_out, training = texts[:64], texts[64:]
    tokens = _tokenize(tokenizer, training, _TRAINING_CHARS)
    model = _train(tokens)
    return _compute_rows(model, _tokenize(tokenizer, held_out, _TRAINING_CHARS)[: ROWS + _LENGTH])


def _load_sources() -> list[str]:
    """Return the Python sources in an order that mixes the packages."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    order = np.random.default_rng(0).permutation(len(files))
    return [files[i].read_text("utf-8", errors="ignore")[:100_000] for i in order]


def _limit_characters(texts: list[str], chars: int) -> list[str]:
    sums = itertools.accumulate(map(len, texts))
    return [text for text, total in zip(texts, sums, strict=False) if total <= chars]


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_limit_characters(texts, _TOKENIZER_CHARS), trainer)
    return tokenizer


def _tokenize(tokenizer: Tokenizer, texts: list[str], chars: int) -> NDArray[np.int64]:
    encodings = tokenizer.encode_batch_fast(_limit_characters(texts, chars))
    return np.concatenate([np.array(encoding.ids, np.int64) for encoding in encodings])


class SmallModel(torch.nn.Module):
    """A two-layer Qwen3 with a tied head, whose bias is the log of each token's frequency."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
        )
        self.base = Qwen3Model(config)
        self.base.embed_tokens.sparse = True
        counts = torch.bincount(torch.from_numpy(tokens), minlength=VOCAB) + 0.1
        self.log_frequency = (counts / counts.sum()).log()

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        weight = self.base.embed_tokens(ids)
        return states @ weight.T / math.sqrt(128) * 8 + self.log_frequency[ids]


def _train(tokens: NDArray[np.int64]) -> SmallModel:
    """Train with a sampled softmax.

    The classes are the targets of the batch and tokens drawn from the text. Each logit is
    corrected by the log of its token's probability of being drawn.
    """
    model = SmallModel(tokens)
    inclusion_probability = -torch.expm1(_NEGATIVES * torch.log1p(-model.log_frequency.exp()))
    table = model.base.embed_tokens.weight
    dense_parameters = [parameter for parameter in model.parameters() if parameter is not table]
    optimizers = (
        torch.optim.Adam(dense_parameters, lr=2e-3),
        torch.optim.SparseAdam([table], lr=2e-3),
    )
    data = torch.from_numpy(tokens)
    for _ in range(_STEPS):
        starts = torch.randint(len(data) - _LENGTH - 1, (_BATCH,))
        windows = data[starts[:, None] + torch.arange(_LENGTH + 1)]
        targets = windows[:, 1:].reshape(-1)
        sampled_ids = data[torch.randint(len(data), (_NEGATIVES,))].unique()
        ids, where = torch.cat([sampled_ids, targets]).unique(return_inverse=True)
        states = model.base(input_ids=windows[:, :-1]).last_hidden_state.flatten(0, 1)
        logits = model.logits(states, ids) - inclusion_probability[ids].log()
        loss = torch.nn.functional.cross_entropy(logits, where[len(sampled_ids) :])
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


@torch.inference_mode()
def _compute_rows(model: SmallModel, tokens: NDArray[np.int64]) -> RowBlock:
    all_ids = torch.arange(VOCAB)
    windows = torch.from_numpy(tokens[: ROWS + 1]).unfold(0, _LENGTH + 1, _LENGTH)
    parts = []
    for window in windows:
        states = model.base(input_ids=window[None, :-1]).last_hidden_state[0]
        logprobs = model.logits(states, all_ids).log_softmax(-1)
        head, ids = logprobs.topk(HEAD)
        token = logprobs.gather(1, window[1:, None])[:, 0]
        tail = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1)
        parts.append((ids.int(), head, tail, token))
    columns = [torch.cat(column).numpy() for column in zip(*parts, strict=True)]
    return RowBlock(*columns)


def main() -> None:
    began = time.perf_counter()
    torch.set_num_threads(1)
    block = model_rows()
    print(f"{len(block)} rows of {block.k} ids in {time.perf_counter() - began:.0f} s: {_CACHE}")
    print(f"perplexity {math.exp(-block.token_logprobs.mean()):.0f}")
    print(f"mass of the head {np.exp(block.head_logprobs).sum(1).mean():.3f}")


if __name__ == "__main__":
    main()
