"""The database stays as large as its jobs; of 10,000 jobs see benchmarks/server/retention.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.server.retention import measure


@pytest.mark.slow
def test_the_database_stays_as_large_as_its_jobs(tmp_path: Path) -> None:
    sizes_before, sizes_after = asyncio.run(measure(tmp_path, jobs=40, steps=10_000))
    assert 40 <= sizes_before.jobs <= 52 >= sizes_after.jobs >= 40, (sizes_before, sizes_after)
    # One job continues: it has 1,500 events at most. All steps would take 4.8 MB.
    assert sizes_after.events <= sizes_before.events + 1500
    assert sizes_after.database_bytes <= sizes_before.database_bytes + 750_000
