"""Parses untrusted values: JSON, texts, numbers and token ids.

Records, passages, server responses and model directories are read with these functions, so all of
them accept the same values. Each function raises ValueError with a clause as its message. The
caller adds the location, the field and the remedy. `open_regular` and `read_document` read small
files from untrusted directories, where a pipe could block and a sparse file could exceed memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from protos.operating_system import NON_BLOCKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# One half of a surrogate pair, as an escape sequence; alone it is no valid text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Largest JSON document. The tokenizer.json of a vocabulary of 262,144 tokens has half this size.
MAX_BYTES = 64 << 20


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON text, or its bytes in UTF-8 with or without a byte order mark.

    Lone surrogates, which tokenizers and files reject, become "?". Raises ValueError for invalid or
    too deeply nested JSON.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            valid = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            value = json.loads(valid)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    return value


def parse_text(value: object) -> str:
    """Return a value as text. A number becomes its shortest decimal: 72.0 is "72".

    Raises ValueError for other types, and for numbers that are not finite.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value}, not text")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{type(value).__name__}, not text")
    # Without a point or an exponent where there need be none.
    return format(Decimal(repr(value)), "f").removesuffix(".0")


def parse_number(value: object) -> float:
    """Return a number as float. Raises ValueError if the value is not a finite number.

    Texts and booleans are not numbers.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number:g}")
    return number


def parse_ids(value: object) -> NDArray[np.int32]:
    """Return a list of integers as int32 [n].

    Negative integers become -1. Integers above the range of int32 become 2^31 - 1. Raises
    ValueError for other values, including fractions and True.
    """
    import numpy as np  # here, because job files are read without numpy

    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be a list of integers")
    try:
        ids = np.array(value, np.int64)
    except OverflowError as error:
        raise ValueError("must be a list of integers of 64 bits") from error
    return ids.clip(-1, np.iinfo(np.int32).max).astype("<i4")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without blocking. Raises OSError if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | NON_BLOCKING)
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
