"""Preflight checks read directories that may belong to somebody else: they do not wait for pipes,
do not read huge files into memory, and report invalid content as an error of the user.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clients.config.offline import OfflineJob
from clients.data.outside import read_document
from clients.data.tokens.tokenizer import chat_templates_in, tokens_in
from clients.preflight.disk import parameters_of
from clients.store.captured_store import captured_store_of
from clients.store.manifest import read_manifest
from protos.errors import Corrupt, DistillError, InvalidInput

# The metadata of a captured store, with words instead of numbers.
FACTS = {
    **{"teacher_fingerprint": "t", "tokenizer_fingerprint": "t", "vocab_size": "8"},
    **{"top_k": "many", "temperature": "1", "tail_samples": "0", "sequences": "0"},
}


def test_pipes_and_holes_are_not_read(tmp_path: Path) -> None:
    """A thread that reads a pipe would wait for ever and delay the shutdown of the server."""
    for name in ("tokenizer.json", "model.safetensors.index.json", "manifest.json"):
        os.mkfifo(tmp_path / name)
    assert tokens_in(tmp_path) is None
    assert parameters_of(tmp_path) == 0
    with pytest.raises(OSError, match="not a regular file"):
        read_manifest(tmp_path)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(OSError, match="not a regular file"):
        chat_templates_in(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for name in ("config.json", "chat_template.jinja"):
        with (tmp_path / name).open("w") as file:
            file.truncate(1 << 40)
    with pytest.raises(ValueError, match="longer than 1 MiB"):
        chat_templates_in(tmp_path)
    with pytest.raises(ValueError, match="longer than 64 MiB"):
        read_document(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("manifest", "category"),
    [
        ("[" * 100_000, Corrupt),
        (json.dumps({"schema_version": 2, "shards": [], "metadata": FACTS}), InvalidInput),
    ],
    ids=["depth", "a word for a number"],
)
def test_a_hostile_manifest_is_a_sentence(
    manifest: str, category: type[DistillError], tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    job = {"student": {"model": "x/y"}, "data": {"path": str(tmp_path)}}
    with pytest.raises(category) as caught:
        captured_store_of(OfflineJob.model_validate({**job, "method": {"type": "offline"}}))
    assert caught.value.field == "data.path"
