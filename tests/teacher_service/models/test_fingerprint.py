"""C8: whatever changes a teacher's rows, or the tokens they are of, gives another fingerprint, and
nothing else does; rows that were kept for one are found for no other.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clients.teacher.query import ScoreQuery, row_key
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock, encode_rows
from teacher_service.cache.row_cache import EncodedRows, RowCache
from teacher_service.engines.hf import HfEngine

QUERY = ScoreQuery(np.arange(1, 12, dtype=np.int32), 1, top_k=4)


def config(**values: object) -> Callable[[Path], None]:
    return in_json("config.json", lambda document: document.update(values))


def in_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        document = json.loads((path / name).read_text())
        change(document)
        (path / name).write_text(json.dumps(document))

    return edit


def void(_: object) -> None:
    pass


def one_ulp(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    norm = weights["model.norm.weight"]
    norm[0] = torch.nextafter(norm[0], torch.tensor(2.0))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def swap_tokens(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add_token(tokenizer: Any) -> None:
    tokenizer["added_tokens"].append(
        {
            **{"id": 95, "content": "<new>", "single_word": False, "lstrip": False},
            **{"rstrip": False, "normalized": False, "special": True},
        }
    )


CHANGED_FILES: dict[str, Callable[[Path], None]] = {
    "one weight by 1 ulp": one_ulp,
    "rope theta": config(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
    "rope scaling": config(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    ),
    "maximal length": config(max_position_embeddings=256),
    "norm epsilon": config(rms_norm_eps=1e-5),
    "window": config(use_sliding_window=True, sliding_window=8, max_window_layers=0),
    "two tokens swapped": in_json("tokenizer.json", swap_tokens),
    "an added token": in_json("tokenizer.json", add_token),
}
# A teacher gets token ids and makes one forward pass, so these leave its rows as they are.
IRRELEVANT_FILES: dict[str, Callable[[Path], None]] = {
    "program": config(transformers_version="5.0.0", _name_or_path="/tmp/x", dtype="float16"),
    "cache of generation": config(use_cache=False, eos_token_id=3, max_length=7),
    "training": config(attention_dropout=0.5, initializer_range=1.0, output_attentions=False),
    "how text is split": in_json(
        "tokenizer.json", lambda document: document.update(pre_tokenizer=None)
    ),
    "chat template": in_json(
        "tokenizer_config.json", lambda document: document.update(chat_template="{{ messages }}")
    ),
    "chat template file": lambda path: void((path / "chat_template.jinja").write_text("{{ 1 }}")),
    "words": lambda path: void((path / "README.md").write_text("words")),
}
CHANGED_SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "each sequence alone": {"batch_invariant": True},
}
CHANGED_PROGRAMS = {"transformers": "5.99.0", "torch": "2.99.0"}


def test_every_change_gives_another_fingerprint_and_no_hits(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = HfEngine(str(tiny_model), device="cpu")
    same = HfEngine(str(shutil.copytree(tiny_model, tmp_path / "same")), device="cpu")
    assert same.info.fingerprint == teacher.info.fingerprint

    other_engines: dict[str, HfEngine] = {}
    for name, change in CHANGED_FILES.items():
        path = shutil.copytree(tiny_model, tmp_path / name)
        change(path)
        other_engines[name] = HfEngine(str(path), device="cpu")
    for name, settings in CHANGED_SETTINGS.items():
        other_engines[name] = HfEngine(str(tiny_model), **{"device": "cpu", **settings})
    for name, version in CHANGED_PROGRAMS.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"teacher_service.engines.hf.{name}.__version__", version)
            other_engines[name] = HfEngine(str(tiny_model), device="cpu")
    fingerprints = {name: engine.info.fingerprint for name, engine in other_engines.items()}
    by_fingerprint = {document: name for name, document in fingerprints.items()}
    by_fingerprint[teacher.info.fingerprint] = "unchanged"
    assert sorted(by_fingerprint.values()) == sorted([*other_engines, "unchanged"])
    assert len(other_engines) >= 12

    (block,) = teacher.score([QUERY])
    assert isinstance(block, RowBlock)

    async def main() -> None:
        async with RowCache(memory_bytes=1 << 20) as cache:
            key = row_key(teacher.info.fingerprint, 0, QUERY)
            cache.put(key, QUERY, EncodedRows(encode_rows(block), block))
            assert await cache.get(row_key(same.info.fingerprint, 0, QUERY), QUERY)
            for fingerprint in [*fingerprints.values()]:
                assert await cache.get(row_key(fingerprint, 0, QUERY), QUERY) is None
            assert await cache.get(row_key(teacher.info.fingerprint, 1, QUERY), QUERY) is None
            assert cache.counters()["hits"] == 1

    asyncio.run(main())
    print(f"{len(other_engines)} single changes: {len(other_engines)} other fingerprints, 0 hits")


def test_what_does_not_change_rows_does_not_count(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = HfEngine(str(tiny_model), device="cpu", dtype="float32")
    [expected] = teacher.score([QUERY])
    assert isinstance(expected, RowBlock)
    for name, change in IRRELEVANT_FILES.items():
        path = shutil.copytree(tiny_model, tmp_path / name)
        change(path)
        other_engine = HfEngine(str(path), device="cpu", dtype="float32")
        assert other_engine.info.fingerprint == teacher.info.fingerprint, name
        [rows] = other_engine.score([QUERY])
        assert isinstance(rows, RowBlock)
        assert encode_rows(rows) == encode_rows(expected), name
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu999")
    patched = HfEngine(str(tiny_model), device="cpu", dtype="float32")
    assert patched.info.fingerprint == teacher.info.fingerprint


def test_an_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Loaded, it would bring a base model from elsewhere, which no fingerprint has seen."""
    path = shutil.copytree(tiny_model, tmp_path / "adapted")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="adapter") as caught:
        HfEngine(str(path), device="cpu")
    assert caught.value.hint.startswith("move adapter_config.json and the adapter")
