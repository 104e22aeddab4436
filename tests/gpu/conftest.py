from __future__ import annotations

import pytest
import torch

from tests.student_trainer import tiny


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> tiny.Material:
    return tiny.save_material(tmp_path_factory.mktemp("material"))
