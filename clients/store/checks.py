"""Summaries of stores, and checks of their files for damage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from clients.data.object_urls import is_object_url
from clients.store.copies import manifest_at
from clients.store.manifest import SEQUENCES
from clients.store.objects import ObjectFolder
from clients.store.shards import ShardFacts, open_shard, require_arrow
from protos.errors import Corrupt
from protos.rows.codec import verify_rows


def count_sequences(place: Path | str) -> tuple[int, int]:
    """Return two numbers: the sequences in a store now, and the sequences after a complete capture.

    Raises NotFound if there is no store, Corrupt if its manifest is damaged.
    """
    manifest = manifest_at(place)
    sequences = sum(facts.count for facts in manifest.shards)
    return sequences, int(manifest.metadata.get(SEQUENCES, sequences))


def summary_of(place: Path | str) -> dict[str, str | int | float | bool]:
    """Return the metadata in the manifest and the counts of a store, as values for JSON.

    - `bytes`: size of all shards
    - `tokens`, `rows`: number of all tokens, and number of scored tokens; read from the shards, and
      missing for a store at a URL

    Raises NotFound if there is no store, Corrupt if the manifest or a shard is damaged,
    InvalidInput if pyarrow is not installed.
    """
    manifest = manifest_at(place)
    require_arrow()
    sequences = sum(facts.count for facts in manifest.shards)
    size = sum(facts.bytes for facts in manifest.shards)
    expected_sequences = int(manifest.metadata.get(SEQUENCES, sequences))
    shard_counts = (
        {} if is_object_url(place) else _count_in_shards(Path(place), manifest.shards, size)
    )
    return {
        "path": str(place),
        "complete": sequences == expected_sequences,
        **shard_counts,
        "bytes": size,
        "shards": len(manifest.shards),
        **manifest.metadata,
        "sequences": sequences,
        "sequences_expected": expected_sequences,
    }


def _count_in_shards(path: Path, shards: Sequence[ShardFacts], size: int) -> dict[str, int | float]:
    """Return the numbers of tokens and rows, and the bytes per row, read from the shards.

    `size`: size of all shards in bytes. Raises Corrupt if a shard is damaged.
    """
    tokens = rows = 0
    for facts in shards:
        try:
            shard = open_shard(path / facts.name, facts)
        except (OSError, ValueError) as error:
            raise Corrupt(f"shard {facts.name} of {path} is damaged: {error}") from error
        shard_tokens = int(shard.token_offsets[-1]) // 4
        tokens += shard_tokens
        rows += shard_tokens - int(shard.starts.sum())
    per_row = round(size / rows, 2) if rows else 0.0
    return {"tokens": tokens, "rows": rows, "bytes_per_row": per_row}


def damages(place: Path | str) -> Iterator[str]:
    """Read every byte of the store. Yield one sentence for each damaged or missing shard.

    For a store on a disk, the sentence also names the first damaged sequence, if it can be
    determined. Raises NotFound if there is no store, Corrupt if the manifest is damaged.
    """
    folder = ObjectFolder(str(place)) if is_object_url(place) else None
    first_index = 0
    for facts in manifest_at(place).shards:
        if folder is None:
            damage = damage_of(Path(place), facts, first_index)
        else:
            damage = _damage_at(folder, facts)
        if damage is not None:
            yield f"shard {facts.name}: {damage}"
        first_index += facts.count


def _damage_at(folder: ObjectFolder, facts: ShardFacts) -> str | None:
    digest = folder.digest(facts.name)
    if digest is None:
        return "the file is missing"
    return None if digest == facts.sha256 else "its sha256 does not match"


def damage_of(path: Path, facts: ShardFacts, first_index: int) -> str | None:
    """Return a text about the damage of a shard; None if its sha256 matches.

    `first_index`: index of the shard's first sequence in the whole store. Raises InvalidInput if
    the sha256 does not match and pyarrow is not installed.
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
            verify_rows(shard.entry(row).rows)
        except Corrupt as error:
            return f"sequence {first_index + row}: {error.message}"
    return "its sha256 does not match, although every sequence passes its checks"
