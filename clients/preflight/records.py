"""Estimates the disk and the memory that the records of a job take on the machine that runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.config.tables.job import JobConfig
from clients.data.formats import files_of, read_start
from clients.data.object_urls import is_object_url
from clients.data.records import DataSet
from clients.store.record_cache import BYTES_PER_RECORD, is_hashed, records_directory
from protos.errors import DistillError

# Typical bytes of text for each byte of a data file.
_EXPANSIONS = {".gz": 4.0, ".zst": 4.0, ".parquet": 3.0}
# Bytes beside the copy for each record: its state, and its place in three orders.
_BESIDE_RECORD = 1 + 3 * 4


@dataclass(frozen=True)
class RecordsEstimate:
    """The disk space and memory for the records of a job that are in local files.

    - records: number of records.
    - epoch_records: number of records of `data.path`.
    - copy_bytes: size in bytes of the copies that the job has to make.
    - free_bytes: free bytes on the disk of `directory`.
    - directory: the directory of the copies.
    """

    records: int
    epoch_records: int
    copy_bytes: int
    free_bytes: int
    directory: Path

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the records take in each process.

        The number is 0 if the disk has room for the copies, because a process maps them from the
        disk.
        """
        return 0 if self.has_room else self.copy_bytes

    @property
    def has_room(self) -> bool:
        """Whether the disk has room for the copies."""
        return self.copy_bytes <= self.free_bytes

    @property
    def facts(self) -> dict[str, int]:
        """The number of records, and the sizes in bytes, for the option `--json`."""
        sizes = {"memory": self.memory_bytes, "copy": self.copy_bytes, "free": self.free_bytes}
        return {"records": self.records, **sizes}

    def __str__(self) -> str:
        """Return one line for people."""
        records = f"about {self.records:,} records"
        if not self.copy_bytes:
            return f"{records}; their copy in {self.directory} exists"
        copy = f"{self.copy_bytes / 1e9:.2g} GB in {self.directory}"
        free = f"{self.free_bytes / 1e9:.3g} GB free"
        if self.has_room:
            return f"{records}; a copy of {copy} ({free}), made once"
        return (
            f"{records}: {self.memory_bytes / 2**20:,.0f} MiB of memory a process, because their"
            f" copy of {copy} does not fit ({free}): free space, or set XDG_CACHE_HOME to another"
            " disk"
        )


def estimate_records(config: JobConfig) -> RecordsEstimate | None:
    """Return the estimate for a job.

    Returns None if the job reads no local file of records, if it makes no copies, or if a file
    cannot be read.
    """
    if not config.copies_records:
        return None
    records = epoch_records = copy_bytes = 0
    epoch_paths = {file.path for file in config.data_files if file.field == "data.path"}
    try:
        for path in {data_file.path for data_file in config.data_files}:
            if is_object_url(path):
                continue
            if files := files_of(path, "data.path"):
                count, size = _estimate_files(files)
                records += count
                epoch_records += count if path in epoch_paths else 0
                bytes_per_record = BYTES_PER_RECORD + _BESIDE_RECORD
                copy_bytes += 0 if is_hashed(DataSet(path)) else size + count * bytes_per_record
        directory = records_directory()
        existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
        free_bytes = shutil.disk_usage(existing).free
    except (DistillError, OSError):  # other checks report it
        return None
    if not records:
        return None
    return RecordsEstimate(records, epoch_records, copy_bytes, free_bytes, directory)


def _estimate_files(names: Sequence[str]) -> tuple[int, int]:
    """Return (number of records in the files, bytes of the records as JSON). Both are estimates.

    The function reads the start of the first file, but only the sizes of the other files, because a
    pattern may name thousands of files.
    """
    paths = [Path(name) for name in names]
    size = sum(path.stat().st_size * _EXPANSIONS.get(path.suffix, 1.0) for path in paths)
    _, first = read_start(names[0], "data.path")
    texts = [json.dumps(record, ensure_ascii=False, default=str) for record in first]
    mean = sum(len(text.encode()) for text in texts) / max(len(texts), 1)
    return (max(round(size / mean), len(first)) if mean else 0), round(size)
