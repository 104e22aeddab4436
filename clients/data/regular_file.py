"""Reads small files from untrusted directories, where a pipe could block and a sparse file could
exceed memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from clients.data.outside import parse_json

# Largest JSON document. The tokenizer.json of a vocabulary of 262,144 tokens has half this size.
MAX_BYTES = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking. Raises OSError if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_document(path: Path) -> Any:
    """Return the parsed JSON of a file.

    Raises OSError if the file cannot be read or is not a regular file, and ValueError if it is not
    JSON, nested too deeply, or longer than MAX_BYTES.
    """
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} is longer than {MAX_BYTES >> 20} MiB")
    return parse_json(data)
