"""Reads the records of a data set (files, a saved directory, or a hub id) and their values."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from clients.data.formats import FORMATS, files_of, read_records, suffix_of
from clients.data.hub import hub_error
from clients.data.outside import parse_number, parse_text
from clients.data.parquet import Record, count_parquet, first_line, from_arrow
from protos.errors import InvalidInput
from protos.extras import install_command

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSet:
    """The location of a data set.

    - path: a file or a pattern of files (see `formats`), a directory of `save_to_disk`, or a hub
      id.
    - name: configuration of a hub data set.
    - split: split of a hub data set or of a saved directory.
    - field: the key that errors name.
    """

    path: str
    name: str | None = None
    split: str = "train"
    field: str = "data.path"

    @cached_property
    def files(self) -> list[str]:
        """The files of records, in order; empty for a directory or a hub id."""
        return files_of(self.path, self.field)

    def place(self, file: int, row: int) -> str:
        """Return the place of a record for messages, such as `row 3 of a.jsonl`.

        `file`: the index of the file. `row`: the number of the record in the file, from 1.
        """
        return f"row {row} of {self.files[file] if self.files else self.path}"

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, Record]]:
        """Yield (place, record) for every record in order. The place is a text for messages.

        See `located` for the columns and the errors.
        """
        for file, row, record in self.located(columns):
            yield self.place(file, row), record

    def count(self, columns: Sequence[str], limit: int) -> int:
        """Return the number of records, at most `limit`.

        The count of Parquet files reads only their metadata. Raises InvalidInput as `located` does.
        """
        if not self.files:
            return sum(1 for _ in islice(self.records(columns), limit))
        count = 0
        for path in self.files:
            if suffix_of(path) == ".parquet":
                count += count_parquet(path, self.field)
            else:
                records = read_records(path, columns, self.field)
                count += sum(1 for _ in islice(records, max(0, limit - count)))
        return min(limit, count)

    def located(self, columns: Sequence[str]) -> Iterator[tuple[int, int, Record]]:
        """Yield (index of the file, row in the file from 1, record) for every record in order.

        A record has each of `columns` that exists, and possibly more columns. Raises InvalidInput
        if a line is not a JSON object, if the data set cannot be loaded, or if the package
        `datasets` is needed and not installed.
        """
        for file, path in enumerate(self.files):
            for row, record in enumerate(read_records(path, columns, self.field), 1):
                yield file, row, record
        if self.files:
            return
        dataset = self._load_with_datasets()
        float32_columns = {
            name
            for name, feature in (dataset.features or {}).items()
            if getattr(feature, "dtype", "") in ("float32", "float16")
        }
        for row, record in enumerate(dataset, 1):
            yield 0, row, from_arrow(record, float32_columns)

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """Yield every record in order. See `located` for the columns and the errors."""
        for _, record in self.rows(columns):
            yield record

    def fingerprint(self) -> str:
        """Return a text that changes if the records change.

        It is the sha256 of the files, or, for a hub id, the fingerprint of the `datasets` library.
        """
        path = Path(self.path)
        if path.is_file():
            return _hash_file(path)
        files = [Path(name) for name in self.files]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
        if files:
            root = path if path.is_dir() else Path(os.path.commonpath([f.parent for f in files]))
            facts = [[file.relative_to(root).as_posix(), _hash_file(file)] for file in files]
            facts.append([self.split, self.name or ""])
            return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        fingerprint: str = self._load_with_datasets()._fingerprint
        return fingerprint

    def _load_with_datasets(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise InvalidInput(
                f"{self.path} is no file of records ({FORMATS}), and other data needs the package"
                " `datasets`, which is not installed",
                field=self.field,
                hint=install_command("train"),
            ) from error
        try:
            if not (Path(self.path) / "state.json").is_file() and not _has_splits(self.path):
                return datasets.load_dataset(self.path, self.name, split=self.split)
            saved_data = datasets.load_from_disk(self.path)
            return saved_data[self.split] if _has_splits(self.path) else saved_data
        except Exception as error:  # the library raises anything from ValueError to OSError here
            raise hub_error(
                error,
                f"cannot load the data set {self.path!r}: {first_line(error)}",
                field=self.field,
                hint="check data.path, data.name, data.split and the network, or give a .jsonl"
                " file",
            ) from error


def text_of(record: Mapping[str, Any], column: str, field: str, location: str) -> str:
    """Return the text in a column of a record; numbers become text: 72.0 is "72".

    `location` describes the record in messages, such as `row 3 of data.jsonl`. Raises InvalidInput,
    naming `field`, if the column does not exist or has another type.
    """
    if column not in record:
        raise InvalidInput(
            f"there is no column {column!r} in {location}; it has {', '.join(record)}",
            field=field,
            hint="name the column that holds the text",
        )
    try:
        return parse_text(record[column])
    except ValueError as error:
        kind, _, problem = str(error).partition(", ")
        raise InvalidInput(
            f"{location} has {kind} in column {column!r}, {problem}",
            field=field,
            hint="write the value as one string, or remove the row",
        ) from error


_ADDRESSES = ("data:", "http://", "https://", "s3://", "gs://", "file://")


def images_of(record: Mapping[str, Any], column: str, location: str) -> tuple[str | bytes, ...]:
    """Return the images in a column of a record: the path or the encoded bytes of each.

    The column contains one image, a list of images, or no value. An image is a path, bytes, or
    {bytes, path} as in data sets of the hub. Raises InvalidInput, naming `location`, for other
    values.
    """
    value = record.get(column)
    images: list[str | bytes] = []
    for element in value if isinstance(value, list) else [] if value is None else [value]:
        image = (
            element.get("bytes") or element.get("path") if isinstance(element, dict) else element
        )
        if not isinstance(image, str | bytes) or not image:
            raise InvalidInput(
                f"{location} has {type(element).__name__} in column {column!r}, not an image",
                field="data.image_column",
                hint="write the path of a PNG, JPEG or WebP file, or its bytes, or a list of them",
            )
        if isinstance(image, str) and image.startswith(_ADDRESSES):
            raise InvalidInput(
                f"{location} has {image[:40]!r} in column {column!r}, and web addresses are not"
                f" supported",
                field="data.image_column",
                hint="write the path of a local file, or put the bytes into a .parquet file",
            )
        images.append(image)
    return tuple(images)


def weight_of(record: Mapping[str, Any], column: str, location: str) -> float:
    """Return the weight in a column of a record, a finite number of at least 0.

    Raises InvalidInput, naming `location`, if the column is missing or has another value.
    """
    try:
        weight = parse_number(record.get(column))
        if weight < 0:
            raise ValueError(f"{weight:g}")
    except ValueError as error:
        problem = "has no" if column not in record else f"has {error} in"
        raise InvalidInput(
            f"{location} {problem} column {column!r}, which must hold a number of at least 0",
            field="data.weight_column",
            hint="correct or remove the row",
        ) from error
    return weight


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return the counts that are not zero as text, such as `12 too long, 3 without an answer`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def describe_left_out(
    reasons: Mapping[str, int], records: int, max_share: float
) -> tuple[str, bool]:
    """Return (sentence about skipped records, whether their share exceeds `max_share`).

    `reasons`: the number of skipped records by reason. `records`: the number of all records.
    """
    left_out = sum(reasons.values())
    sentence = f"{left_out:,} of {records:,} records ({left_out / records:.0%}) are left out"
    return sentence, left_out > max_share * records


def check_left_out(reasons: Mapping[str, int], records: int, max_share: float, field: str) -> None:
    """Log how many of `records` are skipped, by reason; log nothing if no record is skipped.

    Raises InvalidInput, naming `field`, if their share is larger than `max_share`.
    """
    if not any(reasons.values()):
        return
    sentence, is_too_many = describe_left_out(reasons, records, max_share)
    sentence += f": {describe_counts(reasons)}"
    if is_too_many:
        raise InvalidInput(
            sentence,
            field=field,
            hint="correct the data or the limit, or raise data.max_left_out, which is"
            f" {max_share:g}; distill preview shows the records",
        )
    log.warning("%s: %s", field, sentence)


def _has_splits(path: str) -> bool:
    return (Path(path) / "dataset_dict.json").is_file()


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
