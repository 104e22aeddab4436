"""Merges the stores of all parts of a capture into one store.

The merged store is byte-identical to the store of a capture in one part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clients.store.checks import damages
from clients.store.copies import manifest_at, on_disk
from clients.store.manifest import (
    PART,
    SEQUENCES,
    UNSPLIT,
    Manifest,
    require_same,
    shard_name,
    write_manifest,
)
from clients.store.shards import ShardFacts
from protos.errors import Corrupt, InvalidInput, WrongState


def merge(out: Path, parts: Sequence[Path | str]) -> int:
    """Verify all parts, and create the store `out` with the shards of all parts.

    The shards are hard links where possible, else copies. `parts` may be in any order. Parts at a
    URL are first copied to the user's cache. If an error occurs, `out` is not created. Returns the
    number of sequences.

    Raises InvalidInput if `parts` are not all parts of one capture, WrongState if `out` exists or
    if a part is incomplete or of another capture, NotFound if a part is not a store, Corrupt if a
    part is damaged.
    """
    if out.exists():
        raise WrongState(f"{out} already exists", hint="choose a new directory")
    manifests = _sort_parts([on_disk(part) for part in parts])
    for path, _ in manifests:
        if damage := next(damages(path), None):
            raise Corrupt(f"{path}: {damage}", hint="capture this part again")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards: list[ShardFacts] = []
    for path, manifest in manifests:
        for facts in manifest.shards:
            name = shard_name(len(shards))
            _link_or_copy(path / facts.name, partial / name)
            shards.append(replace(facts, name=name))
    sequences = sum(facts.count for facts in shards)
    metadata = {**manifests[0][1].metadata, PART: UNSPLIT, SEQUENCES: str(sequences)}
    write_manifest(partial, Manifest(metadata, shards))
    partial.rename(out)
    return sequences


def _sort_parts(parts: Sequence[Path]) -> list[tuple[Path, Manifest]]:
    manifest_by_part: dict[str, tuple[Path, Manifest]] = {}
    for path in parts:
        manifest = manifest_at(path)
        part = manifest.metadata.get(PART, "")
        if not part:
            raise InvalidInput(
                f"{path} was not written by distill capture", hint="merge captured stores only"
            )
        if part in manifest_by_part:
            raise InvalidInput(
                f"{path} and {manifest_by_part[part][0]} are both part {part}",
                hint="give each part once",
            )
        manifest_by_part[part] = (path, manifest)
        _require_complete(path, manifest)
        first_path, first_manifest = next(iter(manifest_by_part.values()))
        hint = f"the latter is the value in {first_path}; merge parts of one capture only"
        require_same(
            path, manifest.metadata, first_manifest.metadata, ignoring=(PART, SEQUENCES), hint=hint
        )
    count = int(next(iter(manifest_by_part)).split("/")[1])
    missing = [
        f"{index}/{count}" for index in range(count) if f"{index}/{count}" not in manifest_by_part
    ]
    if missing or len(manifest_by_part) != count:
        raise InvalidInput(
            f"the capture has {count} parts, but these are not given: {', '.join(missing)}"
            if missing
            else f"{len(manifest_by_part)} stores are given, but the capture has {count} parts",
            hint="give every part of one capture, and no other store",
        )
    return [manifest_by_part[f"{index}/{count}"] for index in range(count)]


def _require_complete(path: Path, manifest: Manifest) -> None:
    stored_sequences, expected_sequences = (
        sum(facts.count for facts in manifest.shards),
        manifest.metadata[SEQUENCES],
    )
    if str(stored_sequences) != expected_sequences:
        raise WrongState(
            f"{path} has {stored_sequences} of {expected_sequences} sequences",
            hint="resume its capture and let it finish",
        )


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to an immutable file, or a copy if a link is not possible.

    A link is not possible between file systems, for example.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("r+b") as stream:
            os.fsync(stream.fileno())
