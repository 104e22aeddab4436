"""Small files that a stranger may have made, read without waiting: a pipe among them would never
end, and a file with holes could be longer than memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

# Of a document: the tokenizer of a vocabulary of 262,144 takes half of it.
MOST_BYTES = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """To be read. Raises OSError for what is no file, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_document(path: Path) -> Any:
    """The JSON in a file. Raises OSError, and ValueError for what is none or too long."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} is longer than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{path} is too deep") from error
