"""Models that an evaluation runs in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import InvalidInput
from student_trainer.exam.local_model import LocalModel
from tests.student_trainer import tiny
from tests.student_trainer.exam.conftest import Material, exam
from tests.student_trainer.run.test_self_test import random_model


@pytest.mark.filterwarnings("default")  # those of the model's own code
def test_a_model_that_samples_from_another_policy_is_refused(
    material: Material, tmp_path: Path
) -> None:
    """Its answers would depend on the other prompts of their batch."""
    path = tiny.save(random_model("rwkv"), tiny.tokenizer(), tmp_path / "rwkv")
    config = exam(material, tmp_path / "out", models={"rwkv": str(path)})
    with pytest.raises(InvalidInput, match="sampling two sequences of one length") as caught:
        LocalModel(config, str(path))
    assert caught.value.field == "MODEL"
