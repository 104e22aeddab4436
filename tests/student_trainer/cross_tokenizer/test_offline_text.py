"""Learning from packed plain text of a teacher with another tokenizer, one token per character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from student_trainer.cross_tokenizer.losses import UNIT_TEMPERATURE
from tests.student_trainer import tiny
from tests.student_trainer.cross_tokenizer.material import (
    TEMPERATURE,
    WEIGHT,
    FirstUpdate,
    first_row,
    job,
    pair,
    teacher,
)
from tests.student_trainer.small_store import Text, logprobs_of, sums, write_store

__all__ = ["pair", "teacher"]  # fixtures

SIZE = 20


def pieces() -> list[Text]:
    """Return the concatenated documents, cut after every 20 tokens, as a capture does."""
    ids = [token for text, _ in sums(60) for token in text]
    return [(ids[i : i + SIZE], 1) for i in range(0, len(ids) - SIZE + 1, SIZE)]


@pytest.fixture(scope="module")
def store(material: tiny.Material, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "store"
    tokenizer = str(material.teacher)
    return write_store(
        path, teacher, pieces(), temperature=TEMPERATURE, tokenizer=tokenizer, form="text"
    )


def encode_piece(ids: list[int], words: PreTrainedTokenizerFast) -> list[int]:
    """Return the student's tokens of a piece: those of each document and its end."""
    texts = tiny.tokenizer().decode(ids).split("<|end|>")
    documents = [words(text)["input_ids"] if text else [] for text in texts]
    return [token for document in documents for token in [*document, words.eos_token_id]][:-1]


def expected_losses(
    model: Any, teacher: Any, words: PreTrainedTokenizerFast, ids: list[int], match: str
) -> tuple[torch.Tensor, int]:
    """Return a piece's loss and learned tokens: all but the first, and the last two if open.

    A token of the teacher is a character, so a chunk is a token of the student. The row of the
    teacher's first token is not stored, so the student's first is not learned.
    """
    student_ids = encode_piece(ids, words)
    logits = model(input_ids=torch.tensor([student_ids])).logits[0, :-1].double()
    table = (logits / TEMPERATURE).log_softmax(1)
    rows = logprobs_of(teacher, (ids, 1), TEMPERATURE)
    end, teacher_end = words.eos_token_id, tiny.tokenizer().eos_token_id
    # student_ids[last_end:] is the open document.
    last_end = max(i for i, student_id in enumerate([end, *student_ids]) if student_id == end)
    learned_indices = [
        i for i in range(1, len(student_ids)) if i < len(student_ids) - 2 or i < last_end
    ]
    place, total = 0, torch.zeros((), dtype=torch.float64)
    for i, token in enumerate(student_ids):
        length = 1 if token == end else len(words.decode([token]))
        if i in learned_indices:
            log_p = table[i - 1, token]
            teacher_range = range(place, place + length)
            log_q = sum(rows[j - 1, ids[j]] for j in teacher_range)
            if match == "row":
                total = total + log_q - (1 + WEIGHT) * log_p
                if student_ids[i - 1] == end:
                    total = total + first_row(rows[place - 1], table[i - 1], ids[place], words)
            else:
                a, b = (logprob.div(UNIT_TEMPERATURE).exp() for logprob in (log_q, log_p))
                kl = a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()
                total = total + UNIT_TEMPERATURE * kl - WEIGHT * log_p
        place += length
    assert place == len(ids)
    assert teacher_end in ids
    return total, len(learned_indices)


@pytest.mark.parametrize("match", ["row", "chunk"])
@pytest.mark.parametrize("tokens", [1, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_formula(
    pair: tiny.Material, store: Path, teacher: Any, tmp_path: Path, tokens: int, match: str
) -> None:
    """From the disk to the gradient, packed or one by one, against plain forward passes."""
    changes: dict[str, Any] = {"method__match": match, "method__cross_entropy": WEIGHT}
    config = job(pair, store, train__tokens_per_micro_batch=tokens, **changes)
    update = FirstUpdate.of(config, tmp_path / "run")
    words = PreTrainedTokenizerFast.from_pretrained(pair.student)
    by_line = {tuple(encode_piece(ids, words)): ids for ids, _ in pieces()}
    losses_and_counts = [
        expected_losses(
            update.model, teacher, words, by_line[tuple(sequence.token_ids.tolist())], match
        )
        for sequence in update.sequences
    ]
    losses, learned_counts = zip(*losses_and_counts, strict=True)
    count = sum(sequence.learned for sequence in update.sequences)
    assert sum(learned_counts) < count
    update.assert_is_that_of(torch.stack(losses).sum() / count)
