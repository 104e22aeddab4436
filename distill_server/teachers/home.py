"""The directory of a teacher that the server runs: its record, its command line and its log.

.teachers/KEY/teacher.json       model and options, newest attempt, port, GPUs
              lease            touched by the server at each poll
              tokens             the token that the teacher accepts, if the server has such a token
              logs/attempt-N/    rank-0.log, and the files of the attempt's shim
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter

from clients.config.tables.teacher import STARTED_KEYS, TeacherLink
from clients.data.outside import open_regular
from clients.runs.directory import RunDirectory, replace_file
from clients.runs.launch import PROGRESS, teacher_command
from distill_server.runners.local.lease import LEASE_FILE
from protos.rpc.channel import TEACHER_TOKEN, token_of

_NAME = ".teachers"
_LISTENING_LINE = re.compile(rb"^teacher listening on (\S+:(\d+))$", re.MULTILINE)
_STAGE_LINE = re.compile(rb" INFO %s stage=(.+)$" % PROGRESS.encode(), re.MULTILINE)
# The limit for one read: a teacher prints its address after the engine's output while it loads.
_MAX_BYTES = 8 << 20
_LINE_CHARS = 500


@dataclass(frozen=True)
class Record:
    """The content of teacher.json. `port` is the newest attempt's port, 0 before it listens."""

    teacher: Mapping[str, str | int | bool | None]
    attempt: int
    port: int
    gpus: tuple[str, ...] | None

    @property
    def link(self) -> TeacherLink:
        """Model and options, as in the table `teacher` of a job."""
        return TeacherLink.model_validate(dict(self.teacher))


_RECORD = TypeAdapter(Record)


def key_of(teacher: TeacherLink) -> str:
    """Return the key of a teacher: a digest of its model and its options.

    The key also changes with the files of a local model. Jobs with equal keys share a teacher.
    """
    assert teacher.model is not None
    identity = [
        teacher.model_dump_json(include=set(STARTED_KEYS)),
        *_list_files(Path(teacher.model)),
    ]
    return sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _list_files(path: Path) -> list[tuple[str, int, int]]:
    if not path.is_dir():
        return []
    entries = ((entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in entries)


def home_of(runs: Path, key: str) -> RunDirectory:
    """Return the directory of a teacher. It has the same layout of logs as a run directory."""
    return RunDirectory(runs / _NAME / key)


def homes_in(runs: Path) -> list[RunDirectory]:
    """Return the directories of all teachers that the server has run."""
    return [RunDirectory(path.parent) for path in (runs / _NAME).glob("*/teacher.json")]


def read_record(home: RunDirectory) -> Record | None:
    """Read teacher.json; None if it is missing or not valid."""
    try:
        with open_regular(home.path / "teacher.json") as file:
            return _RECORD.validate_json(file.read())
    except (OSError, ValueError):
        return None


def write_record(home: RunDirectory, record: Record) -> None:
    """Replace teacher.json and the file of the tokens that the teacher accepts."""
    home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(home.path / "teacher.json", _RECORD.dump_json(record).decode() + "\n")
    tokens = home.path / "tokens"
    tokens.unlink(missing_ok=True)
    if token := token_of(TEACHER_TOKEN):
        with os.fdopen(os.open(tokens, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"read {token}\n")


def renew_lease(home: RunDirectory) -> None:
    """Touch the lease of the teacher. Errors are ignored, because each poll renews the lease."""
    with contextlib.suppress(OSError):
        (home.path / LEASE_FILE).touch()


def remove(home: RunDirectory) -> None:
    """Remove the directory of a teacher that has ended; errors are ignored."""
    shutil.rmtree(home.path, ignore_errors=True)


def command(run: Path, *, attempt: int, processes: int, from_step: int | None = None) -> list[str]:
    """Return the command line of an attempt of the teacher in `run`."""
    record = read_record(RunDirectory(run))
    assert record is not None, "the record is written before the attempt starts"
    tokens = run / "tokens"
    return teacher_command(record.link, record.port, tokens if tokens.exists() else None)


def read_address(log: Path) -> tuple[str, int]:
    """Return HOST:PORT and the port from a teacher's log; ("", 0) before it listens."""
    match = _LISTENING_LINE.search(_read_head(log))
    return ("", 0) if match is None else (match[1].decode(), int(match[2]))


def read_stage(log: Path) -> str:
    """Return the last stage of the start in a teacher's log; "" if there is none."""
    stages = _STAGE_LINE.findall(_read_head(log))
    return stages[-1].decode(errors="replace").strip()[:_LINE_CHARS] if stages else ""


def read_error(log: Path) -> str:
    """Return the last error in a teacher's log, or else its last line."""
    lines = [line.strip() for line in _read_head(log).decode(errors="replace").splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    candidates = errors or [line for line in lines if line] or ["no output"]
    return candidates[-1][:_LINE_CHARS]


def _read_head(log: Path) -> bytes:
    try:
        with open_regular(log) as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""
