"""What is known of a student before its weights are loaded."""

from __future__ import annotations

from pathlib import Path

from clients.config.common import StudentConfig
from student_trainer.model.loading import count_weights
from tests.student_trainer import tiny


def test_weights_are_counted_without_loading_them(tmp_path: Path) -> None:
    """Tied weights once; no file of weights is needed."""
    model = tiny.model(layers=2)
    tiny.save(model, tiny.tokenizer(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_weights(StudentConfig(model=str(tmp_path))) == expected
