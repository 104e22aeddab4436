"""The prompts of a job: read once, held-out ones apart, each step's a pure function of the step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.config import DataConfig
from protos.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids int32 [T] given to the student, and the reference answer ("" if there is none)."""

    ids: NDArray[np.int32]
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
    for field, found in (
        ("data.eval_path" if data.eval_path else "data.path", aside),
        ("data.path", training),
    ):
        if not found:
            raise InvalidInput(
                f"no prompt of at most {max_tokens} tokens is left",
                field=field,
                hint="give more data, fewer eval.prompts, or a larger method.max_prompt_tokens",
            )
    return PromptSet(training, seed), aside, too_long


def _encode(
    path: str, field: str, data: DataConfig, tokenizer: Any, max_tokens: int
) -> tuple[list[Prompt], int]:
    prompts = []
    too_long = 0
    for number, record in enumerate(_records(path, field, data), 1):
        text = _text(record, data.prompt_column, "data.prompt_column", path, number)
        ids = _token_ids(tokenizer, data.template.replace("{prompt}", text))
        if not ids:
            raise InvalidInput(
                f"the prompt of row {number} of {path} has no tokens",
                field=field,
                hint="every answer must have something to follow",
            )
        answer = ""
        if record.get(data.answer_column) is not None:
            answer = _text(record, data.answer_column, "data.answer_column", path, number)
        if len(ids) > max_tokens:
            too_long += 1
        else:
            prompts.append(Prompt(np.array(ids, dtype=np.int32), answer))
    return prompts, too_long


def _text(record: dict[str, Any], column: str, field: str, path: str, number: int) -> str:
    if column not in record:
        raise InvalidInput(
            f"{path} has no column {column!r} in row {number}; it has {', '.join(record)}",
            field=field,
            hint="name the column that holds the text",
        )
    value = record[column]
    if not isinstance(value, str | int | float):
        raise InvalidInput(
            f"row {number} of {path} has {type(value).__name__} in column {column!r}, not text",
            field=field,
            hint="write it as one string",
        )
    return str(value).encode("utf-8", "replace").decode()  # a lone surrogate is no text


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

        wanted = {data.prompt_column, data.answer_column}
        file = pyarrow.parquet.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in wanted]
        # Without the prompt's column read them all: the refusal names what there is.
        read = columns if data.prompt_column in columns else None
        for batch in file.iter_batches(columns=read):
            yield from batch.to_pylist()
    else:
        yield from _hub_records(path, field, data)


def _json_lines(path: str, field: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig").strip()
                record = json.loads(text) if text else None
            except ValueError as error:
                raise InvalidInput(
                    f"{path}:{number} is not JSON: {error}",
                    field=field,
                    hint="each line must be one JSON object, in UTF-8",
                ) from error
            if isinstance(record, dict):
                yield record
            elif text:
                raise InvalidInput(
                    f"{path}:{number} is not a JSON object",
                    field=field,
                    hint='each line must be like {"prompt": "..."}',
                )


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
