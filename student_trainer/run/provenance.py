"""Writes the files environment.json and code.diff: machine, packages and code of an attempt."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from clients.runs.directory import RunDirectory, replace_file
from clients.runs.fence import require_unfenced

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("distill-service", "torch", "transformers", "accelerate", "peft", "numpy", "grpcio")


def write_environment(run: RunDirectory, *, attempt: int, processes: int) -> None:
    """Write environment.json and code.diff of this attempt. They replace those of earlier attempts.

    code.diff is written only if the git checkout has uncommitted changes. Raises WrongState if a
    newer attempt has taken over the run.
    """
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    facts = {
        "attempt": str(attempt),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.node()}, {platform.platform()}",
        "devices": ", ".join(gpus) or "no GPU",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "processes": str(processes),
        "python": platform.python_version(),
        **{name: _installed_version(name) for name in _PACKAGES},
    }
    checkout = source_code(_ROOT)
    if checkout is not None:
        facts["commit"] = checkout.commit + (", and code.diff" if checkout.diff else "")
    require_unfenced()
    if checkout is not None and checkout.diff:
        replace_file(run.code_diff, checkout.diff)
    else:
        run.code_diff.unlink(missing_ok=True)  # written by an earlier attempt
    replace_file(run.path / "environment.json", json.dumps(facts, indent=2) + "\n")


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


_TIMEOUT_SECONDS = 5.0
MAX_DIFF_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceCode:
    """The code of a git checkout.

    - commit: the hash of HEAD.
    - diff: the uncommitted changes of tracked files, cut at MAX_DIFF_BYTES. Untracked files are not
      included.
    """

    commit: str
    diff: str


def source_code(root: Path) -> SourceCode | None:
    """Return the code of the git checkout with the top directory `root`.

    Returns None if `root` is not a git checkout (for example an installed package), if git fails,
    or if git takes more than 5 s.
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
