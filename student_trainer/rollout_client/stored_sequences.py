"""Rollouts in a checkpoint: those of later steps, whose weights no longer exist.

One safetensors file per process, of n rollouts. numbers, starts, lengths, queries [n] int64: number
of the rollout, tokens of its prompt, tokens after it, queries to a retriever. flags [n, 2] bool:
truncated, failed. versions [S, 3] int64: index of the rollout, version, tokens in a row. concluded
[b] uint8: the answers according to an environment, a JSON list of texts or null. token_ids: of all
sequences, one after the other. The other tensors have the tokens after the prompts, and the names
of `Rollout`; own, draw_ids and draw_logprobs are left out if there are none. What a prompt has
beside its tokens is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from student_trainer.data.rollout import Rollout, TailDraws

_PREFIX = "rollouts-"


def file_name(part: int) -> str:
    """Return the name of the file of process `part` in a checkpoint."""
    return f"{_PREFIX}{part}.safetensors"


def encoded(rollouts: Mapping[int, Rollout]) -> bytes:
    """Return the file of rollouts, by rollout number; there is at least one."""
    listed = list(rollouts.values())
    spans = [(n, *span) for n, one in enumerate(listed) for span in one.versions]
    concluded = json.dumps([one.concluded for one in listed]).encode()
    tensors = {
        "numbers": torch.tensor(list(rollouts)),
        "starts": torch.tensor([one.start for one in listed]),
        "lengths": torch.tensor([len(one.token_logprobs) for one in listed]),
        "queries": torch.tensor([one.queries for one in listed]),
        "flags": torch.tensor([(one.truncated, one.failed) for one in listed]),
        "versions": torch.tensor(spans, dtype=torch.int64).reshape(-1, 3),
        "concluded": torch.from_numpy(np.frombuffer(concluded, np.uint8).copy()),
        "token_ids": torch.cat([one.token_ids for one in listed]),
        "head_ids": torch.cat([one.head_ids for one in listed]),
        "token_logprobs": torch.cat([one.token_logprobs for one in listed]),
    }
    own = [one.own for one in listed if one.own is not None]
    if own:
        tensors["own"] = torch.cat(own)
    draws = [one.draws for one in listed if one.draws is not None]
    if draws:
        joined = TailDraws.joined(draws)
        tensors |= {"draw_ids": joined.ids, "draw_logprobs": joined.logprobs}
    data: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return data


def read(checkpoint: Path) -> dict[int, Rollout]:
    """Return the rollouts that all processes have stored in a checkpoint, by rollout number."""
    found: dict[int, Rollout] = {}
    for path in sorted(checkpoint.glob(f"{_PREFIX}*.safetensors")):
        found |= _decoded(load_file(path))
    return found


def _decoded(tensors: Mapping[str, Tensor]) -> dict[int, Rollout]:
    starts, lengths = tensors["starts"].tolist(), tensors["lengths"].tolist()
    whole = [start + length for start, length in zip(starts, lengths, strict=True)]
    token_ids = torch.split(tensors["token_ids"], whole)
    columns = {
        name: torch.split(tensors[name], lengths)
        for name in ("head_ids", "token_logprobs", "own", "draw_ids", "draw_logprobs")
        if name in tensors
    }
    concluded = json.loads(bytes(tensors["concluded"].tolist()))
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, version, tokens in tensors["versions"].tolist():
        spans.setdefault(index, []).append((version, tokens))
    found = {}
    flags, queries = tensors["flags"].tolist(), tensors["queries"].tolist()
    for index, number in enumerate(tensors["numbers"].tolist()):
        draws = None
        if "draw_ids" in columns:
            draws = TailDraws(columns["draw_ids"][index], columns["draw_logprobs"][index])
        truncated, failed = flags[index]
        found[number] = Rollout(
            token_ids=token_ids[index],
            start=starts[index],
            head_ids=columns["head_ids"][index].int(),  # int64 in older checkpoints
            token_logprobs=columns["token_logprobs"][index],
            truncated=truncated,
            answer="",
            own=columns["own"][index] if "own" in columns else None,
            draws=draws,
            concluded=concluded[index],
            queries=queries[index],
            failed=failed,
            versions=tuple(spans.get(index, ())),
        )
    return found
