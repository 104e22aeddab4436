"""A student with another tokenizer than the teacher of a store: one token per character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from clients.config.offline import OfflineJob
from clients.runs.directory import RunDirectory
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.loading import load_model
from student_trainer.tools.pretrain import make_model, make_tokenizer
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.offline_trainer import trainer_of

TEMPERATURE = 1.3
WEIGHT = 0.4


@pytest.fixture(scope="module")
def pair(material: tiny.Material, tmp_path_factory: pytest.TempPathFactory) -> tiny.Material:
    """The teacher of `material`, and a student many of whose tokens are pairs of digits."""
    path = tmp_path_factory.mktemp("pair") / "student"
    numbers = "=".join(f"{number:02}" for number in range(100)) * 3
    words = make_tokenizer("bpe", [numbers], 330)
    torch.manual_seed(3)
    model = make_model(len(words), words, 1, 32)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.3)
    tiny.save(model, words, path)
    return replace(material, student=path)


@pytest.fixture(scope="module")
def teacher(material: tiny.Material) -> Any:
    return load_model(tiny.job(material, student__model=str(material.teacher)).student)


def job(pair: tiny.Material, store: Path, **changes: Any) -> OfflineJob:
    return tiny.offline_job(pair, store, **{"data__tokenizer": "auto", **changes})


def first_row(
    log_q: torch.Tensor, log_p: torch.Tensor, token: int, words: PreTrainedTokenizerFast
) -> torch.Tensor:
    """Return the control variate of an answer's first token; without white space it is one word."""
    head = log_q.topk(4).indices
    if token not in head:
        return torch.zeros((), dtype=torch.float64)
    characters = tiny.tokenizer()
    weights = log_q[head].softmax(0) - (head == token).double()
    texts = [characters.decode([token_id]) for token_id in head.tolist()]
    mapped = [
        words.eos_token_id if "end" in text else words(text)["input_ids"][0] for text in texts
    ]
    return (weights * (log_q[head] - log_p[mapped])).sum()


@dataclass(frozen=True)
class FirstUpdate:
    """A job's first update: mean metrics, sequences, gradients by name, and the model before it."""

    means: Mapping[str, float]
    sequences: Sequence[TokenSequence]
    model: Any
    gradients: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, config: OfflineJob, path: Path) -> FirstUpdate:
        with trainer_of(RunDirectory.create(path, config)) as trainer:
            means = add_gradients(trainer, trainer.method.steps(1).updates[0])
            sequences = [item.sequence for item in trainer.method.steps(1).updates[0]]
            model = trainer.student.trained.model
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return cls(means, sequences, model, gradients)

    def assert_is_that_of(self, mean: torch.Tensor) -> None:
        """Compare metrics and gradients with `mean`, the loss per token, computed with `model`."""
        mean.backward()
        assert self.means["loss"] == pytest.approx(float(mean.detach()), rel=1e-4)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            error = float((self.gradients[name] - parameter.grad).norm() / parameter.grad.norm())
            assert error < 1e-3, name
