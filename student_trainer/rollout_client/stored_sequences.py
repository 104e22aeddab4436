"""Stores in a checkpoint the rollouts of later steps, whose weights no longer exist.

There is one safetensors file per process. It contains these tensors for n rollouts:

- numbers, starts, lengths, queries [n] int64: rollout number, number of tokens of the prompt,
  number of tokens after the prompt, number of queries to a retriever.
- flags [n, 2] bool: truncated, failed.
- versions [S, 3] int64: one row for each run of tokens that were sampled with one version of the
  weights: index of the rollout, version, number of tokens.
- concluded [b] uint8: a JSON list with the answer of each rollout that the environment extracted,
  or null.
- token_ids: the tokens of all sequences, concatenated.

The other tensors have the names of fields of `Rollout` and cover the tokens after the prompts. own,
draw_ids and draw_logprobs are omitted if they are empty. Of a prompt, only the tokens are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from student_trainer.data.sequence import Rollout, TailDraws

_PREFIX = "rollouts-"


def file_name(part: int) -> str:
    """Return the name of the file that process `part` writes into a checkpoint."""
    return f"{_PREFIX}{part}.safetensors"


def encode_rollouts(rollouts: Mapping[int, Rollout]) -> bytes:
    """Return the content of the file for `rollouts`, at least one, by rollout number."""
    listed_rollouts = list(rollouts.values())
    spans = [
        (index, *span) for index, rollout in enumerate(listed_rollouts) for span in rollout.versions
    ]
    concluded = json.dumps([rollout.concluded for rollout in listed_rollouts]).encode()
    tensors = {
        "numbers": torch.tensor(list(rollouts)),
        "starts": torch.tensor([rollout.start for rollout in listed_rollouts]),
        "lengths": torch.tensor([len(rollout.token_logprobs) for rollout in listed_rollouts]),
        "queries": torch.tensor([rollout.queries for rollout in listed_rollouts]),
        "flags": torch.tensor([(rollout.truncated, rollout.failed) for rollout in listed_rollouts]),
        "versions": torch.tensor(spans, dtype=torch.int64).reshape(-1, 3),
        "concluded": torch.from_numpy(np.frombuffer(concluded, np.uint8).copy()),
        "token_ids": torch.cat([rollout.token_ids for rollout in listed_rollouts]),
        "head_ids": torch.cat([rollout.head_ids for rollout in listed_rollouts]),
        "token_logprobs": torch.cat([rollout.token_logprobs for rollout in listed_rollouts]),
    }
    own_masks = [rollout.own for rollout in listed_rollouts if rollout.own is not None]
    if own_masks:
        tensors["own"] = torch.cat(own_masks)
    draws = [rollout.draws for rollout in listed_rollouts if rollout.draws is not None]
    if draws:
        joined_draws = TailDraws.joined(draws)
        tensors |= {"draw_ids": joined_draws.ids, "draw_logprobs": joined_draws.logprobs}
    file_bytes: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return file_bytes


def read_rollouts(checkpoint: Path) -> dict[int, Rollout]:
    """Return the rollouts that all processes stored in a checkpoint, by rollout number."""
    rollouts: dict[int, Rollout] = {}
    for path in sorted(checkpoint.glob(f"{_PREFIX}*.safetensors")):
        rollouts |= _decode_rollouts(load_file(path))
    return rollouts


def _decode_rollouts(tensors: Mapping[str, Tensor]) -> dict[int, Rollout]:
    starts, lengths = tensors["starts"].tolist(), tensors["lengths"].tolist()
    total_lengths = [start + length for start, length in zip(starts, lengths, strict=True)]
    token_ids = torch.split(tensors["token_ids"], total_lengths)
    columns = {
        name: torch.split(tensors[name], lengths)
        for name in ("head_ids", "token_logprobs", "own", "draw_ids", "draw_logprobs")
        if name in tensors
    }
    concluded = json.loads(bytes(tensors["concluded"].tolist()))
    spans: dict[int, list[tuple[int, int]]] = {}
    for index, version, tokens in tensors["versions"].tolist():
        spans.setdefault(index, []).append((version, tokens))
    rollouts = {}
    flags, queries = tensors["flags"].tolist(), tensors["queries"].tolist()
    for index, number in enumerate(tensors["numbers"].tolist()):
        draws = None
        if "draw_ids" in columns:
            draws = TailDraws(columns["draw_ids"][index], columns["draw_logprobs"][index])
        truncated, failed = flags[index]
        rollouts[number] = Rollout(
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
    return rollouts
