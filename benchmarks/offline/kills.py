"""Compares a capture that is killed repeatedly with an undisturbed one."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.offline.material import capture, count_files
from benchmarks.shared.programs import JOBS, ROOT, one_thread_environment, set_options
from clients.config.file import load_job
from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command

SECONDS_TO_PROGRESS = 300.0


def compare_killed_capture(
    work: Path, settings: Mapping[str, str], undisturbed: Path, kills: int
) -> dict[str, Any]:
    """Kill a capture `kills` times, finish it, and compare its files with those of `undisturbed`.

    Returns {kills, files, bytes, equal, at}. `at` lists the number of complete files at each kill.
    `equal` is True if every file of the store, including the manifest, has the same sha256.
    """
    work.mkdir()
    files = count_files(undisturbed)
    if files <= kills:
        raise RuntimeError(f"{files} files are too few for {kills} kills at different ones")
    store = work / "killed"
    file_counts = _kill_repeatedly(settings, store, files, kills)
    capture(settings, store)
    return {
        "kills": len(file_counts),
        "files": files,
        "bytes": sum(file.stat().st_size for file in undisturbed.glob("*.arrow")),
        "equal": hash_files(store) == hash_files(undisturbed),
        "at": file_counts,
    }


def _kill_repeatedly(settings: Mapping[str, str], store: Path, files: int, kills: int) -> list[int]:
    """Run attempts of one job; kill each shortly after its store reaches the next chosen file."""
    store_settings = [*settings.items(), ("method.store", str(store))]
    job = load_job(JOBS / "gsm8k_capture.toml", set_options(dict(store_settings))[1::2])
    run = RunDirectory.create(store.with_name("killed-run"), job.config)
    random_delays = random.Random(0)
    file_counts = []
    for number in range(kills):
        attempt = number + 1
        run.logs(attempt).mkdir(parents=True)
        with run.log_file(attempt).open("wb") as log:
            process = subprocess.Popen(
                trainer_command(run.path, attempt=attempt, processes=1),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=one_thread_environment(),
                start_new_session=True,
            )
        try:
            started_files = 2 + number * (files - 2) // kills  # the first one is complete
            _wait_for(store, started_files, process, SECONDS_TO_PROGRESS)
            # At a random point within a file, but before the capture is finished.
            _wait_for(store, started_files + 1, process, random_delays.uniform(0, 0.1))
            if process.poll() is not None or _count_started_files(store) < started_files:
                raise RuntimeError(f"attempt {attempt} came to no file: {run.log_file(attempt)}")
        finally:
            # Kill the whole session: it may contain other processes.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file_counts.append(count_files(store))
    return file_counts


def _wait_for(store: Path, count: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until `count` files exist, the process has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while (
        _count_started_files(store) < count
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.001)


def _count_started_files(store: Path) -> int:
    """Return the number of shard files, complete or not."""
    return len(list(store.glob("*.arrow*")))


def hash_files(store: Path) -> dict[str, str]:
    """Return the sha256 of every file of a store, except its empty lock file."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.iterdir())
        if file.name != "lock"
    }
