from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.student_trainer import tiny


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def student() -> Any:
    """A model that no test changes."""
    return tiny.model(seed=2, spread=0.2)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> tiny.Material:
    root = tmp_path_factory.mktemp("material")
    tiny.save_material(root)
    return tiny.Material.at(root)
