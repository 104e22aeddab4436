"""Checks of the model directories that a job names, before anything is queued or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clients.config.tables.common import StudentConfig
from clients.config.tables.job import JobConfig
from clients.data.models.check import Reader, check_model


def check_models(config: JobConfig, *, here: bool = True) -> list[str]:
    """Check the student of a job, and the teacher that is started for it, if they are local paths.

    `here`: the programs of the job run in this Python environment; see `check_model`, whose notes
    are returned. Raises InvalidInput. Hub ids and URLs are checked by the programs that fetch them.
    """
    notes: list[str] = []
    student = config.answering_student
    has_template = student is not None and student.chat_template is not None
    for field, model, reader in list_models(config):
        try:
            exists = Path(model).exists()
        except (OSError, ValueError):  # no path, so perhaps a hub id
            continue
        if exists:
            notes += check_model(Path(model), field, reader, here=here, has_template=has_template)
    return notes


def list_models(config: JobConfig) -> Iterator[tuple[str, str, Reader]]:
    """Yield the key, the name and the reader of each model that the job loads."""
    student, teacher = config.answering_student, config.teacher_link
    if student is not None:
        is_trained = isinstance(student, StudentConfig)
        yield "student.model", student.model, "trainer" if is_trained else "evaluation"
    if teacher is not None and teacher.model is not None and teacher.engine != "fake":
        yield "teacher.model", teacher.model, teacher.engine
