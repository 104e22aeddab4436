"""Faults are injected as often as DISTILL_REPEATS says: 3 times, 20 in `make test-all`."""

from __future__ import annotations

import os

import pytest

from tests.distill_server.conftest import make_server
from tests.faults.history import History, record
from tests.teacher_service.conftest import start_teacher

__all__ = ["make_server", "start_teacher"]

REPEATS = int(os.environ.get("DISTILL_REPEATS", "3"))


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> History:
    """The requests and answers of every teacher client in the test."""
    return record(monkeypatch)
