from __future__ import annotations

from pathlib import Path

import pytest

from tests.teacher_service.capture.material import capture_here, job, pairs, save_words, write_pairs


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the fake engine's tokens."""
    return save_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "data.jsonl", pairs(100))


@pytest.fixture(scope="session")
def captured_store(words: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody disturbed and nobody may change."""
    _, store = capture_here(tmp_path_factory.mktemp("whole") / "run", job(data, words))
    return store
