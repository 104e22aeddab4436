"""Draw docs/watch.svg: what `distill watch` shows of the job of `make demo`, at three quarters.

    python -m benchmarks.evidence.watch_picture [--demo runs/demo] [--out docs/watch.svg]

Needs the directory of a demo that has ended. The events of its job are shown again, up to that
step.
"""

from __future__ import annotations

import argparse
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.console import Console

from clients.cli.live.display import LiveBlock
from clients.jobs.job import JobEvent, JobState
from clients.jobs.view import JobView

WIDTH = 100
SHARE = 0.75  # of the steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/watch.svg"))
    options = parser.parse_args()
    (job_directory,) = (options.demo / "jobs").glob("on-policy-*")
    job = JobView(job_directory.name)
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    block = LiveBlock(job, console)
    for event in read_events(options.demo / "jobs" / "server.sqlite", job.job_id):
        if event.step > SHARE * event.max_steps > 0:
            break
        job.add(event)
        block.show(event)
    console.print(block.render())
    # A fixed id, so that the same run makes the same file.
    console.save_svg(str(options.out), title="distill watch @last", unique_id="watch")


def read_events(database: Path, job_id: str) -> Iterator[JobEvent]:
    """Yield the events of the job in order."""
    columns = "seq, time, state, reason, phase, attempt, step, max_steps, metrics"
    query = f"SELECT {columns} FROM events WHERE job_id = ? ORDER BY seq"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        for seq, time, state, *rest, metrics in connection.execute(query, (job_id,)):
            yield JobEvent(seq, time, JobState(state), *rest, json.loads(metrics))


if __name__ == "__main__":
    main()
