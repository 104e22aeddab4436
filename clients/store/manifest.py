"""The manifest of a store. It names the shards, and every update replaces it atomically.

A shard file that the manifest does not name is not part of the store. The metadata of a store that
a capture wrote have these keys:

    teacher, tokenizer, data       display names; ignored when two stores are compared
    teacher_fingerprint, teacher_version, tokenizer_fingerprint, vocab_size
    top_k, temperature, logprob_format, compress, tail_samples, seed
    form, columns, template, max_tokens
    image_column                   column of the images that sequences name; absent without images
    context                        text that only the teacher has read; absent without such text
    data_fingerprint               fingerprint of the data files, or the one `datasets` computes
    sequences_fingerprint          fingerprint of the token ids of all data
    too_long, empty                number of records left out, by reason
    part                           i/n: part i (from 0) of the n parts of the data
    sequences                      number of sequences in this part when it is complete
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clients.data.outside import open_regular
from clients.runs.file_system import lock_file
from clients.store.shards import KEY_BYTES, ShardFacts, write_synced
from protos.errors import Corrupt, WrongState

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
_SHARD_NAME = re.compile(r"[0-9]{8,}\.arrow")
_DISPLAY_NAMES = ("teacher", "tokenizer", "data")
PART, SEQUENCES = "part", "sequences"
UNSPLIT = "0/1"


@dataclass(frozen=True)
class Manifest:
    """The shards of a store in the order of their writing, and the metadata of the store."""

    metadata: Mapping[str, str]
    shards: Sequence[ShardFacts]


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of the store at `path`. Return None if there is no store.

    Raises Corrupt if the manifest cannot be parsed, WrongState if it has another schema version,
    OSError if the file cannot be read.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, place: Path | str) -> Manifest:
    """Parse the content `data` of a manifest file. `place`: path or URL of its store, for errors.

    Raises Corrupt if it cannot be parsed, WrongState if it has another schema version.
    """
    try:
        manifest = json.loads(data)
        version = manifest["schema_version"]
        shards = [ShardFacts(**shard) for shard in manifest["shards"]]
        for shard in shards:
            number_of(shard)
        metadata = dict(manifest["metadata"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(
            f"the manifest of the store {place} is damaged",
            hint="delete the store and capture it again",
        ) from error
    if version != SCHEMA_VERSION:
        raise WrongState(
            f"{place} has schema version {version}, but this program reads {SCHEMA_VERSION}",
            hint="use another directory",
        )
    return Manifest(metadata, shards)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically. When this function returns, it survives a power failure.

    Raises OSError if the disk fails or is full.
    """
    write_synced(path / MANIFEST, manifest_bytes(manifest))


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return the bytes to write into the manifest's file."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "metadata": dict(manifest.metadata),
        "shards": [asdict(shard) for shard in manifest.shards],
    }
    return json.dumps(document, indent=1).encode()


def remove_unnamed(path: Path, shards: Sequence[ShardFacts]) -> None:
    """Delete the files that an interrupted writer left.

    These are temporary files, and shard files that are not in `shards`.
    """
    listed_names = {shard.name for shard in shards}
    for file in [*path.glob("*.tmp"), *path.glob("*.arrow")]:
        if file.name not in listed_names:
            file.unlink()


def shard_name(number: int) -> str:
    """Return the file name of shard `number`, for example "00000003.arrow"."""
    return f"{number:08d}.arrow"


def number_of(shard: ShardFacts) -> int:
    """Return the number in the shard's file name.

    Raises ValueError if the name has another form. A manifest can therefore not name a file outside
    the store.
    """
    if not _SHARD_NAME.fullmatch(shard.name):
        raise ValueError(f"{shard.name!r} is not the name of a shard")
    return int(shard.name.removesuffix(".arrow"))


def lock_store(path: Path) -> int:
    """Take the writer lock of a store, and return the descriptor of the lock.

    Creates the directory `path` if it is missing. Closing the descriptor releases the lock. Raises
    WrongState if another process holds the lock.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock_file(lock, path / "lock", wait=False)
            if os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
                os.utime(path / "lock")  # records the time of last use of the store
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise WrongState(
                f"another process is writing to {path}",
                hint="wait until that process ends, or use another directory",
            ) from error
        except FileNotFoundError:
            pass
        # Another process removed the directory after it was created: try again.
        os.close(lock)


def key_of(index: int) -> bytes:
    """Return the key of a sequence in a store.

    `index`: number of the sequence in the whole data, from 0. In the store of a later part of the
    data, the numbers do not start at 0.
    """
    return index.to_bytes(KEY_BYTES, "big")


def require_same(
    path: Path | str,
    stored: Mapping[str, str],
    expected: Mapping[str, str],
    *,
    ignoring: tuple[str, ...] = (),
    hint: str = "use another directory",
) -> None:
    """Raise WrongState if the metadata of a store differ from the expected metadata.

    - `stored`: the metadata of the store at `path`
    - `expected`: the metadata that the caller needs
    - `ignoring`: keys that are not compared, in addition to the display names
    - `hint`: remedy in the error

    The error names the first key whose values differ.
    """
    for name in [*expected, *stored]:
        if name in _DISPLAY_NAMES or name in ignoring or stored.get(name) == expected.get(name):
            continue
        raise WrongState(
            f"{path} holds rows with {name} = {stored.get(name, 'none')}, not"
            f" {expected.get(name, 'none')}",
            hint=hint,
        )
