"""The prompts of a job: read once, held-out ones apart, each step's a pure function of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from clients.config import DataConfig
from protos.errors import InvalidInput


@dataclass(frozen=True)
class Prompt:
    """Token ids given to the student, and the reference answer ("" when the data has none)."""

    ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts in an order that a seed decides; every epoch has another one."""

    prompts: list[Prompt]
    seed: int

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of optimizer step `step` (from 1), whatever ran before."""
        first = (step - 1) * count
        return [self._at(index) for index in range(first, first + count)]

    def _at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.prompts))
        return self.prompts[_permutation(len(self.prompts), self.seed, epoch)[place]]


def load_prompts(
    data: DataConfig, tokenizer: Any, *, held_out: int, max_tokens: int, seed: int
) -> tuple[PromptSet, list[Prompt], int]:
    """(training prompts, held-out prompts, how many were left out for being too long).

    Held-out prompts come from `data.eval_path`, or are taken out of the training data.
    Raises InvalidInput for a missing file, a missing column, or too little data.
    """
    everything, too_long = _encode(data.path, "data.path", data, tokenizer, max_tokens)
    order = _permutation(len(everything), seed, -1)
    if data.eval_path is not None:
        others, _ = _encode(data.eval_path, "data.eval_path", data, tokenizer, max_tokens)
        aside = [others[i] for i in _permutation(len(others), seed, -1)[:held_out]]
        training = everything
    else:
        aside = [everything[i] for i in order[:held_out]]
        training = [everything[i] for i in order[held_out:]]
    if not training or not aside:
        raise InvalidInput(
            f"{len(everything)} prompts of at most {max_tokens} tokens are too few",
            field="data.path",
            hint="give more data, fewer eval.prompts, or a larger method.max_prompt_tokens",
        )
    return PromptSet(training, seed), aside, too_long


def _encode(
    path: str, field: str, data: DataConfig, tokenizer: Any, max_tokens: int
) -> tuple[list[Prompt], int]:
    prompts = []
    too_long = 0
    for record in _records(path, field, data):
        if data.prompt_column not in record:
            raise InvalidInput(
                f"{path} has no column {data.prompt_column!r}; it has {', '.join(record)}",
                field="data.prompt_column",
                hint="name the column that holds the prompt",
            )
        text = data.template.replace("{prompt}", str(record[data.prompt_column]))
        ids = _token_ids(tokenizer, text)
        if not ids:
            raise InvalidInput(
                f"a prompt of {path} is empty (answer {str(record.get(data.answer_column))!r})",
                field=field,
                hint="there is nothing to go on from: leave it out, or use data.template",
            )
        if len(ids) > max_tokens:
            too_long += 1
        else:
            prompts.append(Prompt(tuple(ids), str(record.get(data.answer_column, ""))))
    return prompts, too_long


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # a prompt is to be continued
    return ids


def _records(path: str, field: str, data: DataConfig) -> Iterator[dict[str, Any]]:
    if path.endswith(".jsonl"):
        yield from _json_lines(path, field)
    elif path.endswith(".parquet"):
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    else:
        yield from _hub_records(path, field, data)


def _json_lines(path: str, field: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidInput(
                    f"{path}:{number} is not JSON: {error.msg}",
                    field=field,
                    hint="each line must be one JSON object",
                ) from error
            if not isinstance(record, dict):
                raise InvalidInput(
                    f"{path}:{number} is not a JSON object",
                    field=field,
                    hint="each line must be one JSON object",
                )
            yield record


def _hub_records(path: str, field: str, data: DataConfig) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(path, data.name, split=data.split)
    except Exception as error:  # the library raises anything from ValueError to OSError here
        raise InvalidInput(
            f"cannot load the data set {path!r}: {str(error).splitlines()[0]}",
            field=field,
            hint="check its name, data.name, data.split and the network, or give a .jsonl file",
        ) from error


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(size), the same on every machine; epoch -1 splits off the held-out."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order
