"""The answers of one model on disk, so that a killed evaluation can continue.

    settings.json         the settings that the answers depend on; other settings are refused
    part-000001.parquet   answers, written atomically
    journal.jsonl         answers that are not in a part yet, one line for those of one `add`
    lock                  held by the process that has the directory open

A line of the journal is written to the operating system before `add` returns, so a killed process
loses no answer. Only one process can have the directory open.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from protos.errors import InvalidInput, WrongState

_ROWS_OF_A_PART = 4096


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
        self, path: Path, settings: Mapping[str, Any], *, rows_of_a_part: int = _ROWS_OF_A_PART
    ) -> None:
        """Open the directory and read its answers. `rows_of_a_part`: answers of a Parquet file.

        Raises InvalidInput if its answers have other settings, WrongState if another process has it
        open.
        """
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._rows = rows_of_a_part
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise WrongState(
                f"another evaluation is writing to {path}",
                hint="wait until it ends, or use another directory",
            ) from None
        try:
            self._check(settings)
            self._answers = {(a.prompt, a.sample): a for a in self._stored()}
            self._unwritten = [a for a in self._journaled() if self._is_new(a)]
            self._journal: IO[bytes] = self._rewritten_journal()
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
        """Store answers: all of them, or none. After this returns, killing the process loses none.

        Skips answers (prompt, sample) that are already stored.
        """
        new = [answer for answer in answers if self._is_new(answer)]
        if not new:
            return
        line = _line(new)
        if self._journal.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._unwritten += new
        if len(self._unwritten) >= self._rows:
            self.write_part()

    def write_part(self) -> None:
        """Move the answers of the journal to a Parquet file."""
        if self._unwritten:
            table = pyarrow.Table.from_pylist(list(map(asdict, self._unwritten)), SCHEMA)
            write_parquet(table, self._path / f"part-{len(self._parts()) + 1:06}.parquet")
            self._unwritten = []
        # A kill before this line leaves answers in both files; reading skips the second copy.
        self._journal.truncate(0)

    def _is_new(self, answer: StoredAnswer) -> bool:
        return self._answers.setdefault((answer.prompt, answer.sample), answer) is answer

    def _parts(self) -> list[Path]:
        return sorted(self._path.glob("part-*.parquet"))

    def _stored(self) -> Iterator[StoredAnswer]:
        for part in self._parts():
            for row in pyarrow.parquet.read_table(part).to_pylist():
                yield StoredAnswer(**row)

    def _journaled(self) -> Iterator[StoredAnswer]:
        file = self._path / "journal.jsonl"
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):  # the last line may be incomplete
                found = json.loads(line)
                for one in found if isinstance(found, list) else [found]:
                    yield StoredAnswer(**one)

    def _rewritten_journal(self) -> IO[bytes]:
        fresh = self._path / "journal.jsonl.tmp"
        fresh.write_bytes(b"".join(_line([answer]) for answer in self._unwritten))
        file = fresh.replace(self._path / "journal.jsonl")
        return file.open("ab", buffering=0)

    def _check(self, settings: Mapping[str, Any]) -> None:
        file = self._path / "settings.json"
        if not file.exists():
            fresh = file.with_suffix(".tmp")
            fresh.write_text(json.dumps(settings, indent=2) + "\n")
            fresh.replace(file)
        found = json.loads(file.read_text())
        other = [key for key in settings if found.get(key) != settings[key]]
        if other:
            key = other[0]
            raise InvalidInput(
                f"{self._path} holds answers for {key} = {found.get(key)}, not {settings[key]}",
                field="--out",
                hint="use another directory, or the settings of these answers",
            )


def write_parquet(table: pyarrow.Table, file: Path) -> None:
    """Write `table` to `file` atomically."""
    fresh = file.with_suffix(".tmp")
    pyarrow.parquet.write_table(table, fresh)
    os.replace(fresh, file)


def _line(answers: Sequence[StoredAnswer]) -> bytes:
    said = [asdict(answer) for answer in answers]
    return json.dumps(said[0] if len(said) == 1 else said).encode() + b"\n"
