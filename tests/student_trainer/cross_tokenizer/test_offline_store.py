"""Learning from a store whose teacher has another tokenizer, one token per character."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from clients.config.offline import OfflineJob
from clients.runs.directory import RunDirectory
from protos.errors import DistillError, InvalidInput
from student_trainer.cross_tokenizer.losses import UNIT_TEMPERATURE
from student_trainer.tools.pretrain import make_model, make_tokenizer
from tests.end_to_end.processes import metrics_of
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
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.offline_trainer import trainer_of
from tests.student_trainer.small_store import Text, logprobs_of, sums, write_store

__all__ = ["pair", "teacher"]  # fixtures

TEXTS = sums(40)


@pytest.fixture(scope="module")
def store(material: tiny.Material, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "store"
    tokenizer = str(material.teacher)
    return write_store(path, teacher, TEXTS, temperature=TEMPERATURE, tokenizer=tokenizer)


def refuse_job(tmp_path: Path, config: OfflineJob) -> DistillError:
    with (
        pytest.raises(DistillError) as caught,
        trainer_of(RunDirectory.create(tmp_path / "run", config)),
    ):
        pass
    return caught.value


def expected_losses(
    model: Any, teacher: Any, words: PreTrainedTokenizerFast, text: Text, match: str
) -> tuple[torch.Tensor, int]:
    """Return an answer's loss and token count. As the teacher has characters, chunks are tokens."""
    ids, start = text
    characters = tiny.tokenizer()
    prompt, answer = (characters.decode(part) for part in (ids[:start], ids[start:-1]))
    prompt_ids = words(prompt)["input_ids"]
    answer_ids = [*words(answer)["input_ids"], words.eos_token_id]
    logits = (
        model(input_ids=torch.tensor([prompt_ids + answer_ids]))
        .logits[0, len(prompt_ids) - 1 : -1]
        .double()
    )
    table = (logits / TEMPERATURE).log_softmax(1)
    log_p = table.gather(1, torch.tensor(answer_ids)[:, None])[:, 0]
    rows = logprobs_of(teacher, text, TEMPERATURE)
    log_q = rows.gather(1, torch.tensor(ids[start:])[:, None])
    if match == "row":
        return first_row(rows[0], table[0], ids[start], words) + (
            log_q.sum() - (1 + WEIGHT) * log_p.sum()
        ), len(answer_ids)
    lengths = [len(words.decode([token])) for token in answer_ids[:-1]]
    assert sum(lengths) == len(answer)
    if match == "word":  # there is no white space
        lengths, log_p = [len(answer)], torch.stack([log_p[:-1].sum(), log_p[-1]])
    run_logprobs = torch.stack([part.sum() for part in log_q.split([*lengths, 1])])
    a, b = (logprobs.div(UNIT_TEMPERATURE).exp() for logprobs in (run_logprobs, log_p))
    kl = a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()
    return UNIT_TEMPERATURE * kl.sum() - WEIGHT * log_p.sum(), len(answer_ids)


@pytest.mark.parametrize("match", ["row", "chunk", "word"])
@pytest.mark.parametrize(
    "tokens",
    [pytest.param(1, marks=pytest.mark.slow), 12, pytest.param(100_000, marks=pytest.mark.slow)],
)
def test_the_gradient_is_that_of_the_formula(
    pair: tiny.Material, store: Path, teacher: Any, tmp_path: Path, tokens: int, match: str
) -> None:
    """From the disk to the gradient, packed or one by one, against plain forward passes."""
    changes: dict[str, Any] = {"method__match": match, "method__cross_entropy": WEIGHT}
    config = job(pair, store, train__tokens_per_micro_batch=tokens, **changes)
    update = FirstUpdate.of(config, tmp_path / "run")
    words = PreTrainedTokenizerFast.from_pretrained(pair.student)
    by_prompt = {tuple(words(_decode_prompt(text))["input_ids"]): text for text in TEXTS}
    losses, counts = zip(
        *[
            expected_losses(
                update.model,
                teacher,
                words,
                by_prompt[tuple(sequence.token_ids[: sequence.start].tolist())],
                match,
            )
            for sequence in update.sequences
        ],
        strict=True,
    )
    assert update.means["tokens"] == sum(counts)
    update.assert_is_that_of(torch.stack(losses).sum() / sum(counts))


def _decode_prompt(text: Text) -> str:
    ids, start = text
    return str(tiny.tokenizer().decode(ids[:start]))


@pytest.mark.slow
def test_it_learns_and_the_names_of_metrics(
    pair: tiny.Material, store: Path, tmp_path: Path
) -> None:
    from student_trainer.run import metrics

    config = job(pair, store, max_steps=30, eval__every=30)
    run = RunDirectory.create(tmp_path / "run", config)
    with trainer_of(run) as trainer:
        assert trainer.train() == "succeeded"
    lines = metrics_of(run)
    assert lines[-1]["eval/kl"] < 0.5 * lines[0]["eval/kl"]
    assert lines[1]["pair/left_out"] == 0
    assert 0 < lines[1]["pair/one_to_one"] < 1
    assert metrics.__doc__ is not None
    explained = {line.split()[0].strip(",;") for line in metrics.__doc__.splitlines() if line}
    for line in lines:
        assert {name for name in line if not name.startswith("time/")} - {"attempt", "step"} <= (
            explained
        )
    assert all(math.isfinite(line.get("loss", 0.0)) for line in lines)


def test_the_same_tokenizer_is_the_usual_job(
    material: tiny.Material, store: Path, tmp_path: Path
) -> None:
    losses = []
    for tokenizer in ("same", "auto"):
        config = job(material, store, data__tokenizer=tokenizer)
        with trainer_of(RunDirectory.create(tmp_path / tokenizer, config)) as trainer:
            losses.append(add_gradients(trainer, trainer.method.steps(1).updates[0]))
    assert losses[0]["loss"] == losses[1]["loss"]
    assert "topk/student_mass" in losses[1]
    config = job(material, store, data__tokenizer="auto", method__match="word")
    with (
        pytest.raises(InvalidInput, match="has the student's tokenizer") as caught,
        trainer_of(RunDirectory.create(tmp_path / "matched", config)),
    ):
        pass
    assert caught.value.field == "method.match"


def test_sequences_that_are_too_long_are_left_out(
    pair: tiny.Material, store: Path, tmp_path: Path
) -> None:
    words = PreTrainedTokenizerFast.from_pretrained(pair.student)
    short_model = make_model(len(words), words, 1, 32)
    lengths = [len(words(_decode_prompt(text))["input_ids"]) for text in TEXTS]
    short_model.config.max_position_embeddings = min(lengths) + 2
    tiny.save(short_model, words, tmp_path / "short")
    config = job(replace(pair, student=tmp_path / "short"), store)
    with trainer_of(RunDirectory.create(tmp_path / "run", config)) as trainer:
        means = add_gradients(trainer, trainer.method.steps(1).updates[0])
    assert 0 < means["pair/left_out"] <= 1


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"data__tokenizer": "same"}, "student.model", "set data.tokenizer = 'auto'"),
        (
            {"data__tokenizer": "/nowhere/at/all"},
            "data.tokenizer",
            "no tokenizer can be loaded from",
        ),
        ({"data__tokenizer": "STUDENT"}, "data.tokenizer", "is not that of the store"),
    ],
)
def test_refusals(
    pair: tiny.Material,
    store: Path,
    tmp_path: Path,
    changes: dict[str, str],
    field: str,
    message: str,
) -> None:
    if changes["data__tokenizer"] == "STUDENT":
        other_tokenizer = make_tokenizer("bpe", ["another text"], 262)
        other_tokenizer.save_pretrained(tmp_path / "other")
        changes = {"data__tokenizer": str(tmp_path / "other")}
    error = refuse_job(tmp_path, job(pair, store, **changes))
    assert error.field == field
    assert message in str(error)


def test_keys_of_prompts_are_refused_beside_plain_text(
    pair: tiny.Material, teacher: Any, tmp_path: Path
) -> None:
    path = write_store(tmp_path / "text", teacher, TEXTS, form="text")
    error = refuse_job(tmp_path, job(pair, path, data__prompts="prompts.jsonl"))
    assert (error.field, "has plain text and no prompts" in str(error)) == ("data.prompts", True)
