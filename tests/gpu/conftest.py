from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.student_trainer import tiny


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> tiny.Material:
    return tiny.save_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Products of float32 matrices are exact, also after a trainer of this process allowed TF32."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
