"""The trainer of an offline job in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clients.config.offline import OfflineJob
from clients.runs.directory import RunDirectory
from clients.runs.progress import Progress
from student_trainer.assembly import assemble
from student_trainer.loop.trainer import Trainer


@contextmanager
def trainer_of(run: RunDirectory) -> Iterator[Trainer]:
    config = run.config()
    assert isinstance(config, OfflineJob)
    progress = Progress(run, attempt=1, max_steps=9, main=True, terminated=lambda: False)
    trainer = assemble(config, run, {}, progress, 1, None)
    yield trainer
    assert trainer.metrics is not None
    trainer.metrics.close()
