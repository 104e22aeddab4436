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
    """Return the path of a run directory until its job is stored."""
    return runs / f"{_PREFIX}{job_id}"


def name_run(runs: Path, job_id: str) -> None:
    """Rename the directory of a stored job. If that fails, the job's start creates a directory."""
    try:
        unnamed_run(runs, job_id).rename(runs / job_id)
    except OSError as error:
        log.warning("job %s: cannot rename its directory: %s", job_id, error.strerror)


def settle_new_runs(store: JobStore, runs: Path) -> None:
    """Rename or delete the directories that a killed server has left. Blocking."""
    for path in runs.glob(f"{_PREFIX}*"):
        job_id = path.name.removeprefix(_PREFIX)
        if store.has(job_id) and not (runs / job_id).exists():
            name_run(runs, job_id)
        else:
            shutil.rmtree(path, ignore_errors=True)
