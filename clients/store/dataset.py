"""A captured store as a map-style data set for torch and Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.data.images import read_stored_images
from clients.store.copies import manifest_at, on_disk
from clients.store.shards import Shard, ShardFacts, StoredRows, open_shard, require_arrow
from protos.errors import Corrupt, InvalidInput
from protos.extras import install_command
from protos.rows.checks import are_ids, check_rows
from protos.rows.codec import RowBlock, decode_rows, max_encoded_bytes


class LogitDataset:
    """A map-style data set of a captured store: item i is sequence i, memory-mapped and verified.

    torch's DataLoader accepts the data set, also with worker processes. Each item is a dict of
    numpy arrays and one int. A sequence has T tokens, of which n = T - start are scored:

    - `input_ids`: int32 [T]
    - `start`: int, the first scored position; the first row is the distribution of token `start`
    - `head_ids`: int32 [n, K]
    - `head_logprobs`: float16 or float32 [n, K], as the capture stored them
    - `tail_logmass`: float32 [n], the log of the tail mass
    - `token_logprobs`: float32 [n], the log-probs of the scored tokens
    - `tail_sample_ids`: int32 [n, M], only if the capture drew M tail samples per row
    - `tail_sample_logprob`: float32 [n], the mean log-prob of the row's tail samples, only with
      `tail_sample_ids`

    `path` may be a URL of object storage. All files are then first copied to the user's cache.

    Raises NotFound if there is no store at `path`; Corrupt, naming the shard or the sequence, if
    data are damaged or missing; InvalidInput if pyarrow is not installed, or if the store was not
    written by a capture.
    """

    def __init__(self, path: Path | str) -> None:
        require_arrow()
        self.path = on_disk(path)
        manifest = manifest_at(self.path)
        self.metadata: Mapping[str, str] = manifest.metadata
        self.facts = manifest.shards
        self._vocab_size, self._top_k, self._tail_samples = _sizes_in(manifest.metadata, self.path)
        self._shards = [self._open_shard(facts) for facts in manifest.shards]
        self._ends = np.cumsum([facts.count for facts in manifest.shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry, block = self.decoded(index)
        arrays = {column.name: getattr(block, column.name) for column in fields(block)}
        return {
            "input_ids": np.frombuffer(entry.token_ids, "<i4"),
            "start": entry.start,
            **{name: array for name, array in arrays.items() if array is not None},
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[LogitDataset], tuple[Path]]:
        # Send only the path to DataLoader workers: each maps the files itself.
        return LogitDataset, (self.path,)

    @property
    def shards(self) -> list[Shard]:
        """The open shards, in the order of the data."""
        return self._shards

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens in each sequence, int64 [number of sequences]."""
        parts = [np.diff(shard.token_offsets) // 4 for shard in self._shards]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def token_ids(self, index: int) -> bytes:
        """Return the token ids of sequence `index`, little-endian int32, without verification.

        Raises IndexError if there is no such sequence.
        """
        shard, row = self._locate(index)
        return bytes(shard.token_ids[shard.token_offsets[row] : shard.token_offsets[row + 1]])

    def content(self, index: int) -> tuple[bytes, tuple[str, ...]]:
        """Return the model input of sequence `index`: its `token_ids`, and the sha256 of each
        image.

        Raises IndexError if there is no such sequence.
        """
        shard, row = self._locate(index)
        images = read_stored_images(shard.images[row]) if shard.images else []
        return self.token_ids(index), tuple(digest for _, digest in images)

    def prompt_ids(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of the prompt of sequence `index`, int32.

        The prompt has all tokens before the first scored token. The checksum is not verified.
        Raises IndexError if there is no such sequence.
        """
        shard, row = self._locate(index)
        ids = np.frombuffer(self.token_ids(index), "<i4")
        return ids[: shard.starts[row]].astype(np.int32)

    def entry(self, index: int) -> StoredRows:
        """Return sequence `index` with its rows still encoded. Negative indices count from the end.

        Raises IndexError if there is no such sequence, Corrupt if its checksum does not match.
        """
        shard, row = self._locate(index)
        return shard.entry(row)

    def decoded(self, index: int) -> tuple[StoredRows, RowBlock]:
        """Return sequence `index` and its decoded rows. Verifies every checksum.

        Raises IndexError if there is no such sequence. Raises Corrupt if the sequence is damaged,
        or if it has ids or log-probs that a teacher with this vocabulary cannot return.
        """
        shard, row = self._locate(index)
        try:
            entry = shard.entry(row)
            return entry, self._decode_rows(entry)
        except Corrupt as error:
            raise Corrupt(
                f"sequence {index} of {self.path}: {error.message} (shard {shard.name})",
                hint=f"run distill store verify {self.path} to list all damage",
            ) from error

    def to_hf_dataset(self) -> Any:
        """Return a `datasets.Dataset` with the same items. It can be shuffled, and items can be
        selected.

        The `datasets.Dataset` contains only indices. It reads an item when the item is used, so the
        rows are not copied. Raises InvalidInput if the package `datasets` is not installed.
        """
        try:
            import datasets
        except ImportError as error:
            raise InvalidInput(
                "to_hf_dataset needs the package `datasets`, which is not installed",
                hint=install_command("train"),
            ) from error

        numbers = datasets.Dataset.from_dict({"index": np.arange(len(self))})
        return numbers.with_transform(self._read_items)

    def _read_items(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        items = [self[int(index)] for index in batch["index"]]
        return {name: [item[name] for item in items] for name in items[0]}

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        first_index = int(self._ends[number]) - self.facts[number].count
        return self._shards[number], index - first_index

    def _decode_rows(self, entry: StoredRows) -> RowBlock:
        token_ids = np.frombuffer(entry.token_ids, "<i4")
        count = len(token_ids) - entry.start
        if not 0 < entry.start < len(token_ids) or not are_ids(token_ids, self._vocab_size):
            raise Corrupt(f"{len(token_ids)} token ids are outside the store's vocabulary")
        max_bytes = max_encoded_bytes(count, self._top_k, self._tail_samples)
        block = decode_rows(entry.rows, max_bytes)
        if (len(block), block.k, block.tail_samples) != (count, self._top_k, self._tail_samples):
            raise Corrupt(f"{len(block)} rows with k = {block.k} do not match {count} tokens")
        check_rows(block, self._vocab_size)
        return block

    def _open_shard(self, facts: ShardFacts) -> Shard:
        try:
            return open_shard(self.path / facts.name, facts)
        except (OSError, ValueError) as error:
            raise Corrupt(
                f"shard {facts.name} of {self.path} is damaged or missing",
                hint=f"run distill store verify {self.path} to list all damage",
            ) from error


def _sizes_in(metadata: Mapping[str, str], path: Path) -> tuple[int, int, int]:
    """Return `vocab_size`, `top_k` and `tail_samples` from the metadata of a store.

    Raises InvalidInput if one of them is missing: the store was not written by a capture.
    """
    try:
        vocab_size, top_k, tail_samples = (
            int(metadata[name]) for name in ("vocab_size", "top_k", "tail_samples")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{path} was not written by distill capture",
            hint="give the store that distill capture wrote",
        ) from error
    return vocab_size, top_k, tail_samples
