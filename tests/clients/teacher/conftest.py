"""Fixtures: a teacher in its own process."""

from tests.teacher_service.conftest import start_teacher  # noqa: F401
