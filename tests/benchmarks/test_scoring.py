"""T11: the scoring head needs the memory that it declares, at any k and number of tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models.scoring import OURS, declared_mib

pytestmark = pytest.mark.slow

VOCAB = 151_936
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("tokens", "k"), [(500, 1), (1500, 64), (1500, 1024)])
def test_peak_memory_of_the_head(tokens: int, k: int) -> None:
    case = ["--memory-of", OURS, str(tokens), str(VOCAB), str(k)]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.models.scoring", *case],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert 0.8 <= float(process.stdout) / declared_mib(tokens, k) <= 1.2
