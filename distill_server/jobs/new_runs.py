"""Directories of runs whose jobs are about to be stored: RUNS/.new-ID, renamed to RUNS/ID.

A server that is killed before it stores the job leaves a directory RUNS/.new-ID, which the next
server deletes. A directory RUNS/ID without a job is the directory of a user, for an import.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from distill_server.jobs.store import JobStore

log = logging.getLogger(__name__)

_PREFIX = ".new-"


def unnamed_run(runs: Path, job_id: str) -> Path:
    """Return the path RUNS/.new-ID, which a run directory has until its job is stored."""
    return runs / f"{_PREFIX}{job_id}"


def name_run(runs: Path, job_id: str) -> None:
    """Rename the run directory of a stored job from RUNS/.new-ID to RUNS/ID.

    An error is only logged: the directory is then created at the start of the job.
    """
    try:
        unnamed_run(runs, job_id).rename(runs / job_id)
    except OSError as error:
        log.warning("job %s: cannot rename its directory: %s", job_id, error.strerror)


def settle_new_runs(store: JobStore, runs: Path) -> None:
    """Rename the directories RUNS/.new-ID of stored jobs, and delete the others. Blocking.

    Call this function when a server starts, because a killed server may have left such directories.
    """
    for path in runs.glob(f"{_PREFIX}*"):
        job_id = path.name.removeprefix(_PREFIX)
        if store.has(job_id) and not (runs / job_id).exists():
            name_run(runs, job_id)
        else:
            shutil.rmtree(path, ignore_errors=True)
