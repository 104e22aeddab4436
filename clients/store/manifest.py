"""What a store of rows consists of: its manifest names the shards, and is replaced as a whole. What
it does not name does not exist.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clients.data.regular_file import open_regular
from clients.store.shards import ShardFacts, write_synced
from protos.errors import Corrupt, WrongState

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
_SHARD_NAME = re.compile(r"[0-9]{8,}\.arrow")


@dataclass(frozen=True)
class Manifest:
    """The shards in the order of writing, and what their rows are of."""

    metadata: Mapping[str, str]
    shards: Sequence[ShardFacts]


def read_manifest(path: Path) -> Manifest | None:
    """None where there is no store. Raises Corrupt when it is unreadable, WrongState when it is of
    another version.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            manifest = json.load(file)
        version = manifest["schema_version"]
        shards = [ShardFacts(**shard) for shard in manifest["shards"]]
        for shard in shards:
            number_of(shard)
        metadata = dict(manifest["metadata"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(
            f"the manifest of {path} is unreadable", hint="delete the directory"
        ) from error
    if version != SCHEMA_VERSION:
        raise WrongState(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}",
            hint="use another directory",
        )
    return Manifest(metadata, shards)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace it; once this returns, it survives a power cut. Raises OSError of the disk."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "metadata": dict(manifest.metadata),
        "shards": [asdict(shard) for shard in manifest.shards],
    }
    write_synced(path / MANIFEST, json.dumps(document, indent=1).encode())


def remove_unnamed(path: Path, shards: Sequence[ShardFacts]) -> None:
    """What a killed or failing writer left: half-written files, and shards that are not named."""
    named = {shard.name for shard in shards}
    for file in [*path.glob("*.tmp"), *path.glob("*.arrow")]:
        if file.name not in named:
            file.unlink()


def shard_name(number: int) -> str:
    return f"{number:08d}.arrow"


def number_of(shard: ShardFacts) -> int:
    """Of a shard's name, which leads nowhere but into the store. Raises ValueError."""
    if not _SHARD_NAME.fullmatch(shard.name):
        raise ValueError(f"{shard.name!r} is not the name of a shard")
    return int(shard.name.removesuffix(".arrow"))


def lock_store(path: Path) -> int:
    """The descriptor of the one writer's lock, in a directory that exists from then on. Raises
    WrongState when another process writes there.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
                os.utime(lock)  # tells when the store was last in use
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise WrongState(
                f"another process writes to {path}", hint="wait for it, or use another directory"
            ) from error
        except FileNotFoundError:
            pass
        # Its directory was removed in between.
        os.close(lock)
