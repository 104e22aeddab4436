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

from benchmarks.offline.material import capture, files_of
from benchmarks.shared.programs import JOBS, ROOT, one_thread_environment, set_options
from clients.config.file import load_job
from clients.runs.directory import RunDirectory
from clients.runs.launch import trainer_command

SECONDS_TO_PROGRESS = 300.0


def killed_captures(
    work: Path, settings: Mapping[str, str], undisturbed: Path, kills: int
) -> dict[str, Any]:
    """Kill a capture `kills` times, finish it, and compare its files with those of `undisturbed`.

    Returns {kills, files, bytes, equal, at}. `at` lists the number of complete files at each kill.
    `equal` is True if every file of the store, including the manifest, has the same sha256.
    """
    work.mkdir()
    files = files_of(undisturbed)
    if files <= kills:
        raise RuntimeError(f"{files} files are too few for {kills} kills at different ones")
    store = work / "killed"
    at = _killed(settings, store, files, kills)
    capture(settings, store)
    return {
        "kills": len(at),
        "files": files,
        "bytes": sum(file.stat().st_size for file in undisturbed.glob("*.arrow")),
        "equal": digests(store) == digests(undisturbed),
        "at": at,
    }


def _killed(settings: Mapping[str, str], store: Path, files: int, kills: int) -> list[int]:
    """Run attempts of one job; kill each shortly after its store reaches the next chosen file."""
    chosen = [*settings.items(), ("method.store", str(store))]
    job = load_job(JOBS / "gsm8k_capture.toml", set_options(dict(chosen))[1::2])
    run = RunDirectory.create(store.with_name("killed-run"), job.config)
    moments = random.Random(0)
    at = []
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
            count = 1 + number * (files - 1) // kills
            _wait_for(store, count, process, SECONDS_TO_PROGRESS)
            # At a random point within a file, but before the capture is finished.
            _wait_for(store, count + 1, process, moments.uniform(0, 0.1))
            if process.poll() is not None or _begun(store) < count:
                raise RuntimeError(f"attempt {attempt} came to no file: {run.log_file(attempt)}")
        finally:
            # Kill the whole session: it may contain other processes.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        at.append(files_of(store))
    return at


def _wait_for(store: Path, count: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until `count` files exist, the process has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while _begun(store) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def _begun(store: Path) -> int:
    """Return the number of shard files, complete or not."""
    return len(list(store.glob("*.arrow*")))


def digests(store: Path) -> dict[str, str]:
    """Return the sha256 of every file of a store, except its empty lock file."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.iterdir())
        if file.name != "lock"
    }
