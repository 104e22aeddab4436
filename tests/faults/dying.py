"""Children that die at failpoints: python -m tests.faults.dying KIND ROOT NAME:ACTION ...

For each, a process forked after the imports does KIND's work under ROOT/NAME:ACTION. Prints the
exit statuses as JSON.
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
    """Writes a new shard to a store that has an old one, then drops the old one."""
    from clients.store.store import LogitStore, StoredRows

    def work(root: Path) -> None:
        with LogitStore(root, write=True) as store:
            store.append([StoredRows(NEW, b"\1\0\0\0", 1, b"new rows")])
            store.drop_oldest()

    return work


def checkpoint_work() -> Work:
    """Saves step 2 again and step 3, where 1 and 2 are saved; deletes the oldest checkpoint."""
    from student_trainer.checkpoints import checkpoint
    from tests.faults.tiny_checkpoint import save

    def work(root: Path) -> None:
        save(root, 2)
        save(root, 3)
        checkpoint.delete_old(root, 2)

    return work


def run_forked(work: Work, root: Path, spec: str) -> int:
    """Run `work` in a forked child; return its exit status: 0, or minus the signal."""
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
