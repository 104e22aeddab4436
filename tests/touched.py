"""The folders of tests that belong to what has changed since a commit.

    python -m tests.touched BASE

prints them on one line, with the tests that type the commands of a changed walk-through; nothing
where only other documents have changed. `make test-touched` runs what `make test` leaves out of
these folders.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]
CODE = ("benchmarks", "clients", "deploy", "distill_server", "protos", "student_trainer")
CODE += ("teacher_service", "tests")
SHARED = PurePath("tests")
WALK_THROUGH = PurePath("tests/end_to_end/test_walk_through.py")
WALK_THROUGH_PAGES = ("docs/getting-started.md", "docs/your-data.md")


def touched_folders(changed: Iterable[str]) -> list[str]:
    """The nearest folder of tests of each changed file, without those inside another."""
    folders = set()
    for name in changed:
        path = PurePath(name)
        if name in WALK_THROUGH_PAGES:
            folders.add(WALK_THROUGH)
        is_code = path.parts[0] in CODE and len(path.parts) > 1
        if not is_code or path.suffix == ".md" or path.is_relative_to("benchmarks/results"):
            continue
        folder = path.parent if path.parts[0] == "tests" else SHARED / path.parent
        while not (ROOT / folder).is_dir():
            folder = folder.parent
        folders.add(folder)
    return sorted(str(folder) for folder in folders if not folders & set(folder.parents))


def main() -> None:
    """Print the folders of the changes since the commit that the command line names."""
    command = ["git", "diff", "--name-only", f"{sys.argv[1]}...HEAD"]
    changed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    print(*touched_folders(changed.stdout.splitlines()))


if __name__ == "__main__":
    main()
