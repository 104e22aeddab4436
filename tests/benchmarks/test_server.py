"""The measurements of the job server at a size that a test can take: counts, no times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.benchmark import SLOTS, measure_load, measure_watching
from tests.distill_server.conftest import Server

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "runs", SLOTS)
    server.start()
    yield server
    server.clean_up()


def test_hundreds_of_submits(server: Server) -> None:
    load = measure_load(server, submits=300)
    assert load.jobs_lost == 0
    assert load.events_checked >= 300
    assert load.memory_after - load.memory_before < 50 * MIB


def test_a_thousand_watchers(server: Server) -> None:
    """Every watcher, also a slow one, receives each event once; the server buffers none."""
    watching = measure_watching(server, watchers=1_000, steps=10)
    assert watching.events >= 13
    assert watching.memory_after - watching.memory_before < 150 * MIB
