"""Which code an attempt runs: the commit of its checkout, and what was changed since."""

from __future__ import annotations

import os
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
        # For `git apply`, whatever somebody likes better.
        form = ("--no-color", "--src-prefix=a/", "--dst-prefix=b/")
        diff = _git(root, "diff", "HEAD", *form, "--no-ext-diff", "--no-textconv")
    except (OSError, subprocess.SubprocessError):
        return None
    return SourceCode(commit, diff)


def _git(root: Path, *arguments: str) -> str:
    # No program of somebody's configuration: it would run in every trainer.
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", *arguments]
    done = subprocess.run(
        command,
        # A hook of git's tells whom it starts of its own repository.
        env={name: of for name, of in os.environ.items() if not name.startswith("GIT_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
        check=True,
    )
    cut = "\n... cut\n" if len(done.stdout) > MOST_BYTES else ""
    return done.stdout[:MOST_BYTES].decode(errors="replace") + cut
