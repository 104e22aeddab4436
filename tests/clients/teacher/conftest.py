"""The fixtures of a teacher in a process of its own."""

from tests.teacher_service.conftest import start_teacher  # noqa: F401
