from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _small_cache() -> None:
    """1 GiB for the prefix cache; by default vLLM takes a part of the machine's memory."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("OMP_NUM_THREADS", "1")
