from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.teacher_service.conftest import tiny_model

__all__ = ["tiny_model"]


@pytest.fixture(autouse=True, scope="session")
def _modest() -> Iterator[None]:
    """1 GiB for the prefix cache, one thread: vLLM would take a part of the machine's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
