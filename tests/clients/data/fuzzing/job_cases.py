"""Cases of whole jobs: the first step of supervised fine-tuning on random data, in this process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from clients.config.sft import SFTJob
from tests.clients.data.fuzzing.data_cases import DataCase, Item, expect_items, make_data_case
from tests.clients.data.fuzzing.renderer import Refusal
from tests.clients.data.fuzzing.tokenizer_files import make_backend, write_tokenizer
from tests.student_trainer.methods.test_sft import learn_step, trainer_of


def run_job_case(random: Random, folder: Path) -> str:
    """Learn one step; its sequences and its loss are those of plain transformers."""
    case, expected = _make_right_case(random)
    model = _write_model(folder / "model", case)
    path = folder / f"data{case.suffix}"
    path.write_bytes(case.data)
    values = case.sft_job(path, str(folder / "model")).model_dump()
    values["train"] |= {"prompts_per_step": 3, "tokens_per_micro_batch": random.choice([1, 4096])}
    values["max_steps"] = 1
    values["track"]["tensorboard"] = False
    with trainer_of(folder / "run", SFTJob.model_validate(values)) as trainer:
        means, _ = learn_step(trainer)
        sequences = [pending.sequence for pending in trainer.method.steps(1).updates[0]]
    items = Counter[Item]()
    for sequence in sequences:
        learned = torch.zeros(len(sequence.token_ids), dtype=torch.bool)
        learned[sequence.places] = True
        ids = tuple(sequence.token_ids.tolist())
        items[ids, tuple(learned.tolist()), sequence.weight] += 1
    assert not items.keys() - {*expected}, f"learns {items} of {expected}: {case}"
    loss = sum(_loss_of(model, item) * count for item, count in items.items())
    tokens = sum(sum(item[1]) * count for item, count in items.items())
    assert means["loss"] == pytest.approx(loss / tokens, rel=1e-5, abs=1e-6), case
    return "learned"


def _make_right_case(random: Random) -> tuple[DataCase, list[Item]]:
    while True:
        case = make_data_case(random, is_right=True)
        try:
            return case, expect_items(case)
        except Refusal:
            continue


def _write_model(path: Path, case: DataCase) -> LlamaForCausalLM:
    """Write a small model with the tokenizer of a case; return it in float64."""
    write_tokenizer(path, case.kind, case.template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=make_backend(case.kind).get_vocab_size(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    return model


def _loss_of(model: LlamaForCausalLM, item: Item) -> float:
    """Return the weighted sum of the cross-entropies of the learned tokens."""
    ids, learned, weight = item
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    return float(losses[torch.tensor(learned[1:])].sum() * weight)
