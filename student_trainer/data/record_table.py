"""Checks the records of one data set once, and encodes each record when a step needs it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from clients.data.records import DataSet
from clients.store.record_cache import States, open_records, read_check, write_check
from protos.errors import InvalidInput
from student_trainer.data.order import Indices
from student_trainer.data.records import PromptRecord, RecordReader

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Encoded = TypeVar("Encoded", covariant=True)

_MAX_ITEMS = 1024  # encoded items that are kept, so that a repeated step is not encoded again
_SECONDS_BETWEEN_REPORTS = 10.0
# Keys of the table `data` that change no item.
_IRRELEVANT = {"path", "name", "split", "mix", "eval_path", "max_left_out"}


class OmissionCounter:
    """Counts the records that are skipped for one reason, and logs the count at 1, 2, 4, 8, ...

    shortest: number of tokens of the shortest skipped record; 0 if the lengths are unknown or no
    record was skipped.
    """

    def __init__(self, description: str) -> None:
        """`description`: the skipped records in words, such as "prompts that are too long"."""
        self.description = description
        self.count = 0
        self.shortest = 0

    def add(self, tokens: int = 0) -> None:
        """Count one record of `tokens` tokens."""
        self.shortest = min(self.shortest or tokens, tokens)
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning("left out so far: %d %s", self.count, self.description)


class Encoder(Protocol[Encoded]):
    """Converts records to the training items of a job, such as prompts."""

    @property
    def omissions(self) -> Sequence[OmissionCounter]:
        """The counters of the skipped records, one for each reason."""

    @property
    def settings(self) -> Sequence[object]:
        """All settings that decide which records have an item, as JSON values."""

    def is_doubtful(self, record: PromptRecord) -> bool:
        """Return whether `encode` may raise InvalidInput for the record.

        Doubtful records are encoded before training starts.
        """

    def encode(self, record: PromptRecord, field: str) -> Encoded | None:
        """Return the item of a record; None if the record is skipped.

        Raises InvalidInput, with the job key `field`, if the record cannot be used.
        """

    def no_items_error(self, field: str) -> InvalidInput:
        """Return the error for data whose records are all left out."""


def encode_or_omit(
    encoder: Encoder[Item], record: PromptRecord, field: str
) -> tuple[Item | None, str]:
    """Return (item, "") for a record with an item, otherwise (None, reason for skipping it).

    Raises InvalidInput if the record cannot be used.
    """
    counts = [omission.count for omission in encoder.omissions]
    item = encoder.encode(record, field)
    reasons = [
        omission.description
        for omission, count in zip(encoder.omissions, counts, strict=True)
        if omission.count > count
    ]
    return item, reasons[0] if item is None else ""


def estimate_used(records: int, surveyed: int, left_out: int) -> int:
    """Estimate how many of `records` records have an item.

    In a sample of `surveyed` records, `left_out` records have no item. The estimate applies the
    share of the sample to all records. It is exact if the sample is all records.
    """
    return round(records * (surveyed - left_out) / max(surveyed, 1))


class RecordTable(Generic[Item]):
    """The records of a data set, by row number (from 0). Memory use does not grow with their count.

    - directory: the folder of the cached records; None without a cache.
    - used_count: the number of records with an item, set by `check`; see `estimate_used`.
    """

    def __init__(
        self, data_set: DataSet, reader: RecordReader, encoder: Encoder[Item], seed: int
    ) -> None:
        """`seed`: the seed by which the rows for `check` were selected."""
        self.field = data_set.field
        self._folder = Path(data_set.path).parent
        self._reader = reader
        self._encoder = encoder
        self._seed = seed
        self._records = open_records(data_set, reader.columns)
        self._key = self._settings_key()
        self._states = States(self._records, self._key)
        self.directory = self._records.directory
        self._items: OrderedDict[int, tuple[Item | None, str]] = OrderedDict()
        self.used_count = 0

    def __len__(self) -> int:
        return len(self._records)

    def check(self, rows: Sequence[int]) -> Counter[str]:
        """Check all records, and return how many of `rows` are skipped for each reason.

        The result is stored with the records. Later attempts and other processes read it and do not
        check again. Raises InvalidInput if a record cannot be used.
        """
        key = hashlib.sha256(json.dumps([self._key, len(rows), self._seed]).encode()).hexdigest()
        with self._records.locked():
            stored = read_check(self._records, key) if self._key else None
            reasons = self._check_records(rows) if stored is None else Counter(stored)
            if stored is None and self._key and reasons.total() < len(self):
                write_check(self._records, key, reasons)
        self.used_count = estimate_used(len(self), len(rows), reasons.total())
        return reasons

    def _check_records(self, rows: Sequence[int]) -> Counter[str]:
        reported_at = time.monotonic()
        for row, (where, record) in enumerate(self._records):
            checked = self._reader.build_record(record, where, self._folder)
            if self._encoder.is_doubtful(checked):
                self._encode_record(row, checked)  # may raise, before the first step
            if time.monotonic() - reported_at > _SECONDS_BETWEEN_REPORTS:
                reported_at = time.monotonic()
                log.info("checking %s: %s of %s records", self.field, f"{row:,}", f"{len(self):,}")
        return Counter(reason for row in rows if (reason := self.encode(row)[1]))

    def item(self, row: int) -> Item | None:
        """Return the item of a record; None if the record is skipped."""
        if row not in self._items and self._states.values[row] == States.LEFT_OUT:
            return None
        return self.encode(row)[0]

    def is_used(self, row: int) -> bool:
        """Return whether a record has an item. Encodes the record if this is not known."""
        if self._states.is_known(row):
            return bool(self._states.values[row] == States.USED)
        return self.item(row) is not None

    def states_of(self, rows: Indices) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two masks: which of `rows` have an item, and for which of `rows` this is known."""
        states = self._states.values[rows]
        is_used = states == States.USED
        return is_used, is_used | (states == States.LEFT_OUT)

    def encode(self, row: int) -> tuple[Item | None, str]:
        """Return (item, "") for a record with an item, otherwise (None, reason for skipping it)."""
        if row not in self._items:
            where, record = self._records[row]
            self._encode_record(row, self._reader.build_record(record, where, self._folder))
        self._items.move_to_end(row)
        return self._items[row]

    def _encode_record(self, row: int, record: PromptRecord) -> None:
        item, reason = encode_or_omit(self._encoder, record, self.field)
        self._states.set(row, used=item is not None)
        self._items[row] = item, reason
        if len(self._items) > _MAX_ITEMS:
            self._items.popitem(last=False)

    def no_items_error(self) -> InvalidInput:
        """Return the error for a table whose records are all left out."""
        if not any(omission.count for omission in self._encoder.omissions):
            for row in range(len(self)):  # an earlier attempt has counted them
                self.encode(row)
        return self._encoder.no_items_error(self.field)

    def _settings_key(self) -> str:
        """Return a digest of all settings that affect the check; "" if the records have images.

        With images, the result of the check also depends on files, so it must not be stored.
        """
        reader = self._reader
        if reader.data.image_column is not None:
            return ""
        facts: Mapping[str, object] = {
            "data": reader.data.model_dump(exclude=_IRRELEVANT),
            "teachers": sorted(reader.teachers),
            "flags": [reader.with_fields, reader.needs_answers, reader.needs_questions],
            "encoder": list(self._encoder.settings),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
