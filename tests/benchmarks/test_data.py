"""The benchmark of reading data: both attempts and all ranks read the same batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.data.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_attempts_and_ranks_read_the_same_batch(tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    main(["--records", "400", "--ranks", "2", "--parts", "start", "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 6
    for method in ("on_policy", "sft", "rl"):
        assert len({run["digest"] for run in runs if run["reader"] == method}) == 1
    main(["--records", "400", "--ranks", "2", "--parts", "start", "--out", str(out)])
    assert json.loads(out.read_text())["runs"] == runs, "nothing is measured twice"
