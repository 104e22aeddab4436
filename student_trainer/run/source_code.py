"""The code that an attempt runs: the commit of the checkout and the uncommitted changes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_SECONDS = 5.0
MAX_DIFF_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceCode:
    """A git checkout. commit: the hash of HEAD. diff: the uncommitted changes of tracked files.

    diff is cut at MAX_DIFF_BYTES; untracked files are not in it.
    """

    commit: str
    diff: str


def source_code(root: Path) -> SourceCode | None:
    """Return the code of the git checkout whose top directory is `root`.

    Returns None if `root` is not one (for example an installed package), or if git fails or takes
    more than 5 s.
    """
    try:
        if Path(_run_git(root, "rev-parse", "--show-toplevel").strip()) != root.resolve():
            return None
        commit = _run_git(root, "rev-parse", "HEAD").strip()
        # The form that `git apply` reads, whatever the user's configuration says.
        diff_options = ("--no-color", "--src-prefix=a/", "--dst-prefix=b/")
        diff = _run_git(root, "diff", "HEAD", *diff_options, "--no-ext-diff", "--no-textconv")
    except (OSError, subprocess.SubprocessError):
        return None
    return SourceCode(commit, diff)


def _run_git(root: Path, *arguments: str) -> str:
    # A file system monitor from the user's configuration would be started by every trainer.
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", *arguments]
    process = subprocess.run(
        command,
        # Under a git hook, GIT_* variables would point to the repository of the hook.
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    cut_notice = "\n... cut\n" if len(process.stdout) > MAX_DIFF_BYTES else ""
    return process.stdout[:MAX_DIFF_BYTES].decode(errors="replace") + cut_notice
