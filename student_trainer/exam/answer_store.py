"""The answers of one model on disk, so that a killed evaluation can continue.

    settings.json         the settings that determine the answers; different ones are refused
    part-000001.parquet   answers, written atomically
    journal.jsonl         answers that are not in a part yet; the answers of one `add` per line
    lock                  held by the process that has the directory open

A line of the journal is written to the operating system before `add` returns, so a killed process
loses no answer. Only one process can have the directory open.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from clients.runs.file_system import lock_file
from protos.errors import InvalidInput, WrongState

_ROWS_PER_PART = 4096


@dataclass(frozen=True)
class StoredAnswer:
    """Answer number `sample` to question number `prompt`.

    tokens: the number of tokens. truncated: True if the answer was cut at max_tokens.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    truncated: bool


SCHEMA = pyarrow.schema(
    [
        ("prompt", pyarrow.int64()),
        ("sample", pyarrow.int64()),
        ("text", pyarrow.string()),
        ("tokens", pyarrow.int64()),
        ("truncated", pyarrow.bool_()),
    ]
)


class AnswerStore:
    """The directory with the answers of one model. A context manager, which holds the lock."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, rows_per_part: int = _ROWS_PER_PART
    ) -> None:
        """Open the directory and read its answers. `rows_per_part`: answers per Parquet file.

        Raises InvalidInput if its answers have different settings, WrongState if another process
        has it open.
        """
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._rows = rows_per_part
        self._lock = (path / "lock").open("w")
        try:
            lock_file(self._lock, path / "lock", wait=False)
        except BlockingIOError:
            self._lock.close()
            raise WrongState(
                f"another evaluation is writing to {path}",
                hint="wait until it ends, or use another directory",
            ) from None
        try:
            self._check_settings(settings)
            self._answers = {(a.prompt, a.sample): a for a in self._read_parts()}
            self._unwritten = [a for a in self._read_journal() if self._add_if_new(a)]
            self._journal: IO[bytes] = self._rewrite_journal()
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._lock.close()

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Return whether the answer (prompt, sample) is stored."""
        return key in self._answers

    def get(self, prompt: int, sample: int) -> StoredAnswer | None:
        """Return the answer (prompt, sample), or None if it is not stored."""
        return self._answers.get((prompt, sample))

    def add(self, *answers: StoredAnswer) -> None:
        """Store all answers or none. Once it returns, killing the process loses none of them.

        Skips answers (prompt, sample) that are already stored.
        """
        new_answers = [answer for answer in answers if self._add_if_new(answer)]
        if not new_answers:
            return
        line = _format_line(new_answers)
        if self._journal.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._unwritten += new_answers
        if len(self._unwritten) >= self._rows:
            self.write_part()

    def write_part(self) -> None:
        """Move the answers of the journal to a Parquet file."""
        if self._unwritten:
            table = pyarrow.Table.from_pylist(list(map(asdict, self._unwritten)), SCHEMA)
            write_parquet(table, self._path / f"part-{len(self._list_parts()) + 1:06}.parquet")
            self._unwritten = []
        # A kill before this line leaves answers in both files; reading skips the second copy.
        self._journal.truncate(0)

    def _add_if_new(self, answer: StoredAnswer) -> bool:
        return self._answers.setdefault((answer.prompt, answer.sample), answer) is answer

    def _list_parts(self) -> list[Path]:
        return sorted(self._path.glob("part-*.parquet"))

    def _read_parts(self) -> Iterator[StoredAnswer]:
        for part in self._list_parts():
            for row in pyarrow.parquet.read_table(part).to_pylist():
                yield StoredAnswer(**row)

    def _read_journal(self) -> Iterator[StoredAnswer]:
        file = self._path / "journal.jsonl"
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):  # the last line may be incomplete
                entries = json.loads(line)
                for entry in entries if isinstance(entries, list) else [entries]:
                    yield StoredAnswer(**entry)

    def _rewrite_journal(self) -> IO[bytes]:
        temporary_path = self._path / "journal.jsonl.tmp"
        temporary_path.write_bytes(b"".join(_format_line([answer]) for answer in self._unwritten))
        file = temporary_path.replace(self._path / "journal.jsonl")
        return file.open("ab", buffering=0)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self._path / "settings.json"
        if not file.exists():
            temporary_path = file.with_suffix(".tmp")
            temporary_path.write_text(json.dumps(settings, indent=2) + "\n")
            temporary_path.replace(file)
        stored_settings = json.loads(file.read_text())
        different_keys = [key for key in settings if stored_settings.get(key) != settings[key]]
        if different_keys:
            key = different_keys[0]
            raise InvalidInput(
                f"{self._path} holds answers for {key} = {stored_settings.get(key)},"
                f" not {settings[key]}",
                field="--out",
                hint="use another directory, or the settings of these answers",
            )


def write_parquet(table: pyarrow.Table, file: Path) -> None:
    """Write `table` to `file` atomically."""
    temporary_path = file.with_suffix(".tmp")
    pyarrow.parquet.write_table(table, temporary_path)
    os.replace(temporary_path, file)


def _format_line(answers: Sequence[StoredAnswer]) -> bytes:
    records = [asdict(answer) for answer in answers]
    return json.dumps(records[0] if len(records) == 1 else records).encode() + b"\n"
