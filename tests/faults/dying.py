"""Children that die at failpoints: python -m tests.faults.dying KIND ROOT NAME:ACTION ...

For each, a process forked after the imports does KIND's work under ROOT/NAME:ACTION; prints how
they ended, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from protos.rpc import failpoints

Work = Callable[[Path], None]
OLD, NEW = bytes(32), b"n" * 32


def store_work() -> Work:
    """An old shard is there; a new one is written, then the old one is dropped."""
    from clients.store.store import LogitStore, StoredRows

    def work(root: Path) -> None:
        with LogitStore(root, write=True) as store:
            store.append([StoredRows(NEW, b"\1\0\0\0", 1, b"new rows")])
            store.drop_oldest()

    return work


def checkpoint_work() -> Work:
    """Step 2 is saved again and step 3 saved, on top of 1 and 2; the oldest is deleted."""
    from student_trainer.checkpoints import checkpoint
    from tests.faults.tiny_checkpoint import save

    def work(root: Path) -> None:
        save(root, 2)
        save(root, 3)
        checkpoint.delete_old(root, 2)

    return work


def run_forked(work: Work, root: Path, spec: str) -> int:
    """The exit status of a child: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        failpoints.arm(spec)
        code = 1
        try:
            work(root)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    kind, root, *specs = sys.argv[1:]
    work = {"store": store_work, "checkpoint": checkpoint_work}[kind]()
    exit_statuses = {spec: run_forked(work, Path(root) / spec, spec) for spec in specs}
    print(json.dumps(exit_statuses))


if __name__ == "__main__":
    main()
