"""Data, tokenizers and jobs for captures, made in a blink."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.config.capture import CaptureJob
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import Progress

VOCABULARY = 64  # of the fake engine
END = 0


def save_words(path: Path, vocabulary: int = VOCABULARY) -> Path:
    """A tokenizer with the fake engine's tokens: `t5 t9` is [5, 9]; t0 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="t0", unk_token="t0")
    words.save_pretrained(path)
    return path


def text(ids: Sequence[int]) -> str:
    return " ".join(f"t{i}" for i in ids)


def pairs(count: int, *, seed: int = 0, longest: int = 12) -> list[tuple[list[int], list[int]]]:
    """Prompts and completions as ids, without the end token."""
    rng = random.Random(seed)

    def some() -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, longest))]

    return [(some(), some()) for _ in range(count)]


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_pairs(path: Path, token_pairs: Sequence[tuple[list[int], list[int]]]) -> Path:
    return write_lines(path, [{"prompt": text(a), "answer": text(b)} for a, b in token_pairs])


def job(data: Path, tokenizer: Path, **changes: Any) -> CaptureJob:
    """By the fake engine, in files of a few sequences. `method__shard="0/2"` sets method.shard."""
    values: dict[str, Any] = {
        "data": {"path": str(data), "tokenizer": str(tokenizer)},
        "teacher": {
            "model": f"vocab={VOCABULARY}",
            "engine": "fake",
            "top_k": 4,
            "max_batch_tokens": 128,
        },
        "method": {"type": "capture", "shard_bytes": 2000, "max_tokens": 64},
    }
    for name, value in changes.items():
        table, key = name.split("__")
        values.setdefault(table, {})[key] = value
    if values["teacher"]["model"] is None:  # a service scores: keys of an engine are refused
        del values["teacher"]["engine"], values["teacher"]["max_batch_tokens"]
    elif "address" in values["teacher"]:
        raise AssertionError("a capture has a service or loads a model")
    return CaptureJob.model_validate(values)


def capture_here(run: Path, config: CaptureJob) -> tuple[Verdict, Path]:
    """In this process, as an attempt of a new run; what it raises is the caller's."""
    from teacher_service.capture.program import capture

    run_directory = RunDirectory.create(run, config)
    progress = Progress(run_directory, attempt=1, max_steps=0, main=True, terminated=lambda: False)
    verdict = capture(run_directory, config, progress, 1)
    return verdict, Path(config.method.store_in(run))


def digests(store: Path) -> dict[str, str]:
    """sha256 of every file of a store but its lock."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.iterdir())
        if file.is_file() and file.name != "lock"
    }
