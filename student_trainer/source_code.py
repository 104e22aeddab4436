"""Which code an attempt runs: the commit of its checkout, and what was changed since."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 5.0
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceCode:
    """Of a checkout. `diff`: of the tracked files, cut at a MiB; what git does not know of is not
    in it.
    """

    commit: str
    diff: str


def source_code(root: Path) -> SourceCode | None:
    """None where `root` is no checkout of its own, as where the package was installed, and where
    git cannot tell.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()) != root.resolve():
            return None
        commit = _git(root, "rev-parse", "HEAD").strip()
        # No program of somebody's configuration: it would run in every trainer.
        diff = _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
    except (OSError, subprocess.SubprocessError):
        return None
    return SourceCode(commit, diff)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(
        command, capture_output=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL
    )
    cut = "\n... cut\n" if len(done.stdout) > MOST_BYTES else ""
    return done.stdout[:MOST_BYTES].decode(errors="replace") + cut
