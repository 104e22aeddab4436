"""A captured store as a data set of other trainers: of torch, and of Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.store.manifest import read_manifest
from clients.store.shards import Shard, ShardFacts, StoredRows, open_shard
from protos.errors import Corrupt, NotFound
from protos.rows.codec import RowBlock, decode_rows


class LogitDataset:
    """Item i is sequence i of the captured data, read from a map of the disk and verified.

    A map-style data set: torch's DataLoader takes it as it is, with workers too. An item has numpy
    arrays: `input_ids` int32 [T]; `start`, the first scored position; and of the n = T - start
    rows, the first of which is about token `start`: `head_ids` int32 [n, K], `head_logprobs` [n, K]
    in the precision of the capture, `tail_logmass` float32 [n], `token_logprobs` float32 [n]; where
    the capture drew M tail samples, `tail_sample_ids` int32 [n, M] and the mean of their log-probs,
    `tail_sample_logprob` float32 [n].

    Raises NotFound where there is no store, Corrupt for a damaged shard or item, naming it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest is None:
            raise NotFound(f"{path} is not a store of rows", hint="it has no manifest.json")
        self.metadata: Mapping[str, str] = manifest.metadata
        self.facts = manifest.shards
        self._shards = [self._open(facts) for facts in manifest.shards]
        self._ends = np.cumsum([facts.count for facts in manifest.shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry, block = self.decoded(index)
        arrays = {one.name: getattr(block, one.name) for one in fields(block)}
        return {
            "input_ids": np.frombuffer(entry.token_ids, "<i4"),
            "start": entry.start,
            **{name: array for name, array in arrays.items() if array is not None},
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[LogitDataset], tuple[Path]]:
        # Workers of a DataLoader map the files themselves.
        return LogitDataset, (self.path,)

    @property
    def shards(self) -> list[Shard]:
        """In the order of the data."""
        return self._shards

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        parts = [np.diff(shard.token_offsets) // 4 for shard in self._shards]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def token_ids(self, index: int) -> bytes:
        """Of sequence `index`, int32 little-endian; not verified."""
        shard, row = self._place(index)
        return bytes(shard.token_ids[shard.token_offsets[row] : shard.token_offsets[row + 1]])

    def entry(self, index: int) -> StoredRows:
        """Sequence `index` with its rows still encoded; negative ones count from the end."""
        shard, row = self._place(index)
        return shard.entry(row)

    def decoded(self, index: int) -> tuple[StoredRows, RowBlock]:
        """Sequence `index` and its rows, all of it verified."""
        shard, row = self._place(index)
        try:
            entry = shard.entry(row)
            return entry, decode_rows(entry.rows)
        except Corrupt as error:
            raise Corrupt(
                f"sequence {index} of {self.path}: {error.message} (shard {shard.name})",
                hint=f"distill store verify {self.path} tells more",
            ) from error

    def to_hf_dataset(self) -> Any:
        """A `datasets.Dataset` of the same items, to be shuffled, selected and mapped. It holds
        numbers only, and reads an item when it is asked for: nothing is copied or converted.
        """
        import datasets

        numbers = datasets.Dataset.from_dict({"index": np.arange(len(self))})
        return numbers.with_transform(self._items)

    def _items(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        items = [self[int(index)] for index in batch["index"]]
        return {name: [item[name] for item in items] for name in items[0]}

    def _place(self, index: int) -> tuple[Shard, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number]) - self.facts[number].count
        return self._shards[number], index - first

    def _open(self, facts: ShardFacts) -> Shard:
        try:
            return open_shard(self.path / facts.name, facts)
        except (OSError, ValueError) as error:
            raise Corrupt(
                f"shard {facts.name} of {self.path} is damaged or missing",
                hint=f"distill store verify {self.path} tells more",
            ) from error
