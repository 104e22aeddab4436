"""Summary and integrity checks of a store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from clients.store.facts import SEQUENCES
from clients.store.manifest import Manifest, read_manifest
from clients.store.shards import ShardFacts, open_shard, require_arrow
from protos.errors import Corrupt, NotFound
from protos.rows.codec import decode_rows


def manifest_of(path: Path) -> Manifest:
    """Read the manifest of a store. Raises NotFound if there is no store, Corrupt if damaged."""
    manifest = read_manifest(path)
    if manifest is None:
        raise NotFound(
            f"{path} is not a store: it has no manifest.json",
            hint="give the directory that distill capture wrote",
        )
    return manifest


def counted(path: Path) -> tuple[int, int]:
    """Return the number of sequences in a store, and the number when its capture is complete.

    Raises NotFound if there is no store, Corrupt if its manifest is damaged.
    """
    manifest = manifest_of(path)
    sequences = sum(facts.count for facts in manifest.shards)
    return sequences, int(manifest.metadata.get(SEQUENCES, sequences))


def summary_of(path: Path) -> dict[str, str | int | float | bool]:
    """Return the manifest's metadata and counts, ready for JSON.

    `tokens` counts all tokens, `rows` the scored ones. `bytes` is the size of all shards. Raises
    NotFound if there is no store, Corrupt if the manifest or a shard is damaged, InvalidInput if
    pyarrow is not installed.
    """
    manifest = manifest_of(path)
    require_arrow()
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
    """Read every byte of the store; yield one sentence for each damaged or missing shard.

    A sentence names the first damaged sequence of the shard, where one can be found. Raises
    NotFound if there is no store, Corrupt if the manifest is damaged.
    """
    first = 0
    for facts in manifest_of(path).shards:
        if (damage := damage_of(path, facts, first)) is not None:
            yield f"shard {facts.name}: {damage}"
        first += facts.count


def damage_of(path: Path, facts: ShardFacts, first: int) -> str | None:
    """Describe the damage of a shard, or return None if its sha256 matches.

    `first` is the store-wide number of the shard's first sequence. Raises InvalidInput if the
    sha256 does not match and pyarrow is not installed.
    """
    try:
        with (path / facts.name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() == facts.sha256:
                return None
    except OSError as error:
        return str(error)
    require_arrow()
    try:
        shard = open_shard(path / facts.name, facts)
    except (OSError, ValueError) as error:
        return str(error)
    for row in range(facts.count):
        try:
            decode_rows(shard.entry(row).rows)
        except Corrupt as error:
            return f"sequence {first + row}: {error.message}"
    return "its sha256 does not match, although every sequence passes its checks"
