"""A name of a run directory that is the same for all its attempts, and unique among services."""

from __future__ import annotations

import secrets
from hashlib import sha256
from pathlib import Path

from clients.data.regular_file import open_regular
from clients.runs.directory import replace_file


def run_identity(run: Path) -> str:
    """Return NAME-HEX for a run directory; a copy of it, or one made anew, has another.

    Call it in one process at a time: the first call writes the file `.identity`.
    """
    path = run / ".identity"
    if not path.exists():
        replace_file(path, secrets.token_hex(16))
    with open_regular(path) as file:
        token = file.read(64)
    return f"{run.name[:100]}-{sha256(token + bytes(run.absolute())).hexdigest()[:16]}"
