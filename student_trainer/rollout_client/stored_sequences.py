"""Sampled sequences in a checkpoint: those of later steps, whose weights no longer exist.

One safetensors file per process. numbers, lengths [n] int64: rollout number and tokens of each
sequence. flags [n, 2] bool: ended, closed. versions [S, 3] int64: index of the sequence, version,
tokens in a row. The other tensors have the tokens of all sequences, one after the other, and the
names of `SampledTokens`; draw_ids and draw_logprobs are left out if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from student_trainer.data.rollout import TailDraws
from student_trainer.rollouts.sampler import SampledTokens

_PREFIX = "rollouts-"


def file_name(part: int) -> str:
    """Return the name of the file of process `part` in a checkpoint."""
    return f"{_PREFIX}{part}.safetensors"


def encoded(sequences: Mapping[int, SampledTokens]) -> bytes:
    """Return the file of sequences, by rollout number; there is at least one."""
    listed = list(sequences.values())
    spans = [(n, *span) for n, one in enumerate(listed) for span in one.versions]
    tensors = {
        "numbers": torch.tensor(list(sequences)),
        "lengths": torch.tensor([len(one.token_ids) for one in listed]),
        "flags": torch.tensor([(one.ended, one.closed) for one in listed]),
        "versions": torch.tensor(spans, dtype=torch.int64).reshape(-1, 3),
        "token_ids": torch.cat([one.token_ids for one in listed]),
        "head_ids": torch.cat([one.head_ids for one in listed]),
        "token_logprobs": torch.cat([one.token_logprobs for one in listed]),
    }
    draws = [one.draws for one in listed if one.draws is not None]
    if draws:
        joined = TailDraws.joined(draws)
        tensors |= {"draw_ids": joined.ids, "draw_logprobs": joined.logprobs}
    data: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return data


def read(checkpoint: Path) -> dict[int, SampledTokens]:
    """Return the sequences that all processes have stored in a checkpoint, by rollout number."""
    found: dict[int, SampledTokens] = {}
    for path in sorted(checkpoint.glob(f"{_PREFIX}*.safetensors")):
        found |= _decoded(load_file(path))
    return found


def _decoded(tensors: Mapping[str, Tensor]) -> dict[int, SampledTokens]:
    lengths = tensors["lengths"].tolist()
    columns = {
        name: torch.split(tensors[name], lengths)
        for name in ("token_ids", "head_ids", "token_logprobs", "draw_ids", "draw_logprobs")
        if name in tensors
    }
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, version, tokens in tensors["versions"].tolist():
        spans.setdefault(index, []).append((version, tokens))
    found = {}
    flags = tensors["flags"].tolist()
    for index, number in enumerate(tensors["numbers"].tolist()):
        draws = None
        if "draw_ids" in columns:
            draws = TailDraws(columns["draw_ids"][index], columns["draw_logprobs"][index])
        ended, closed = flags[index]
        found[number] = SampledTokens(
            columns["token_ids"][index],
            columns["head_ids"][index],
            columns["token_logprobs"][index],
            ended,
            closed,
            draws,
            tuple(spans.get(index, ())),
        )
    return found
