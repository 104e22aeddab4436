"""What is in a store, and whether it is what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from clients.store.facts import SEQUENCES
from clients.store.manifest import Manifest, read_manifest
from clients.store.shards import ShardFacts, open_shard
from protos.errors import Corrupt, NotFound
from protos.rows.codec import decode_rows


def manifest_of(path: Path) -> Manifest:
    """Raises NotFound where there is no store."""
    manifest = read_manifest(path)
    if manifest is None:
        raise NotFound(f"{path} is not a store of rows", hint="it has no manifest.json")
    return manifest


def counted(path: Path) -> tuple[int, int]:
    """Sequences in a store, and those that its capture is to make. Raises Corrupt, NotFound."""
    manifest = manifest_of(path)
    sequences = sum(facts.count for facts in manifest.shards)
    return sequences, int(manifest.metadata.get(SEQUENCES, sequences))


def summary_of(path: Path) -> dict[str, str | int | float | bool]:
    """The facts of the manifest, and counts: `tokens` are all, `rows` the scored ones. Raises
    Corrupt, NotFound.
    """
    manifest = manifest_of(path)
    sequences = tokens = rows = 0
    for facts in manifest.shards:
        try:
            shard = open_shard(path / facts.name, facts)
        except (OSError, ValueError) as error:
            raise Corrupt(f"shard {facts.name} of {path} is damaged: {error}") from error
        of_shard = int(shard.token_offsets[-1]) // 4
        sequences += facts.count
        tokens += of_shard
        rows += of_shard - int(shard.starts.sum())
    size = sum(facts.bytes for facts in manifest.shards)
    expected = int(manifest.metadata.get(SEQUENCES, sequences))
    return {
        "path": str(path),
        "complete": sequences == expected,
        "tokens": tokens,
        "rows": rows,
        "bytes": size,
        "bytes_per_row": round(size / rows, 2) if rows else 0.0,
        "shards": len(manifest.shards),
        **manifest.metadata,
        "sequences": sequences,
        "sequences_expected": expected,
    }


def damages(path: Path) -> Iterator[str]:
    """Reads everything; a sentence about each shard that is not what was written, with the first
    sequence of it that shows the damage. Raises Corrupt, NotFound for the manifest.
    """
    first = 0
    for facts in manifest_of(path).shards:
        if (damage := damage_of(path, facts, first)) is not None:
            yield f"shard {facts.name}: {damage}"
        first += facts.count


def damage_of(path: Path, facts: ShardFacts, first: int) -> str | None:
    """What is wrong with a shard whose first sequence has the number `first`; None: it is what was
    written.
    """
    try:
        with (path / facts.name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() == facts.sha256:
                return None
        shard = open_shard(path / facts.name, facts)
    except (OSError, ValueError) as error:
        return str(error)
    for row in range(facts.count):
        try:
            decode_rows(shard.entry(row).rows)
        except Corrupt as error:
            return f"sequence {first + row}: {error.message}"
    return "its sha256 is another one, though every sequence is sound"
