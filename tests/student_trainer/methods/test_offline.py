"""Learning from a store: sequences that are read, their order, and the gradient."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from clients.runs.directory import RunDirectory
from clients.store.dataset import LogitDataset
from protos.errors import Corrupt, InvalidInput
from student_trainer.data.captured_stores import open_stores
from student_trainer.data.prompts import ModelIds
from student_trainer.loop.trainer import Trainer
from student_trainer.methods.offline import load_task_prompts, split
from student_trainer.methods.offline_steps import StoredSteps, read
from student_trainer.model.loading import load_model
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.student_trainer import tiny
from tests.student_trainer.learning import add_gradients
from tests.student_trainer.methods.offline_trainer import trainer_of
from tests.student_trainer.small_store import Text, block_of, logprobs_of, sums, write_store

TEXTS = sums(40)


@pytest.fixture(scope="module")
def store(material: tiny.Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    teacher = load_model(tiny.job(material, student__model=str(material.teacher)).student)
    path = tmp_path_factory.mktemp("stored") / "store"
    return write_store(path, teacher, TEXTS, samples=2, temperature=1.3)


def learn_first_step(trainer: Trainer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return means and gradients of the first step."""
    means = add_gradients(trainer, trainer.method.steps(1).updates[0])
    model = trainer.student.trained.model
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return means, grads


def expected_loss(model: Any, teacher: Any, text: Text, weight: float) -> torch.Tensor:
    """Return each token's loss from full distributions: a sum of KL terms, and cross-entropy."""
    ids, start = text
    logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double() / 1.3
    log_p, log_q = logits.log_softmax(1), logprobs_of(teacher, text, 1.3)
    head = log_q.topk(4).indices
    gaps = log_q.exp() * (log_q - log_p)
    is_in_head = torch.zeros_like(log_q, dtype=torch.bool).scatter(1, head, True)
    p_tail = log_p.exp().masked_fill(is_in_head, 0).sum(1)
    q_tail = log_q.exp().masked_fill(is_in_head, 0).sum(1)
    block = block_of(teacher, text, top_k=4, samples=2, temperature=1.3)
    assert block.tail_sample_ids is not None
    draw_ids = torch.from_numpy(block.tail_sample_ids.astype(np.int64))
    tail_ratio = (log_q - q_tail.log()[:, None]) - (log_p - p_tail.log()[:, None])
    kl = gaps.masked_fill(~is_in_head, 0).sum(1) + q_tail * (q_tail / p_tail).log()
    kl = kl + q_tail * tail_ratio.gather(1, draw_ids).mean(1)
    return kl - weight * log_p.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


@pytest.mark.parametrize("tokens", [1, 12, 100_000])
def test_the_gradient_is_that_of_the_formula(
    material: tiny.Material, store: Path, tmp_path: Path, tokens: int
) -> None:
    """From the disk to the gradient, packed or one by one, against plain forward passes."""
    config = tiny.offline_job(
        material, store, train__tokens_per_micro_batch=tokens, method__cross_entropy=0.4
    )
    with trainer_of(RunDirectory.create(tmp_path / "run", config)) as trainer:
        means, gradients = learn_first_step(trainer)
        step = [item.sequence for item in trainer.method.steps(1).updates[0]]
    model = trainer.student.trained.model
    teacher = load_model(config.student.model_copy(update={"model": str(material.teacher)}))
    texts = [(sequence.token_ids.tolist(), sequence.start) for sequence in step]
    losses = torch.cat([expected_loss(model, teacher, text, 0.4) for text in texts])
    losses.mean().backward()
    assert means["tokens"] == len(losses)
    assert means["loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-4)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = float((gradients[name] - parameter.grad).norm() / parameter.grad.norm())
        assert error < 1e-4, name


def test_the_names_of_metrics(material: tiny.Material, store: Path, tmp_path: Path) -> None:
    from student_trainer.run import metrics
    from tests.end_to_end.processes import metrics_of

    run = RunDirectory.create(
        tmp_path / "run", tiny.offline_job(material, store, max_steps=2, eval__every=1)
    )
    with trainer_of(run) as trainer:
        assert trainer.train() == "succeeded"
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert metrics.__doc__ is not None
    explained = {line.split()[0].strip(",;") for line in metrics.__doc__.splitlines() if line}
    for line in lines:
        assert {"eval/kl", "eval/perplexity"} <= line.keys()
        assert not {"eval/kl_bound", "ratio/mean", "length/truncated"} & line.keys()
        names = {name for name in line if not name.startswith("time/")}
        assert names - {"attempt", "step"} <= explained


def test_without_samples_there_is_only_a_bound(
    material: tiny.Material, store: Path, tmp_path: Path
) -> None:
    teacher = load_model(tiny.job(material, student__model=str(material.teacher)).student)
    store_without_samples = write_store(tmp_path / "plain", teacher, TEXTS, temperature=1.3)
    evaluated = []
    for number, path in enumerate((store, store_without_samples)):
        run = RunDirectory.create(tmp_path / str(number), tiny.offline_job(material, path))
        with trainer_of(run) as trainer:
            evaluated.append(trainer._evaluate())
    estimate, bound = evaluated
    assert estimate.keys() == {"eval/kl", "eval/kl_stderr", "eval/perplexity"}
    assert bound.keys() == {"eval/kl_bound", "eval/kl_bound_stderr", "eval/perplexity"}
    assert estimate["eval/perplexity"] == bound["eval/perplexity"]


def steps_of(data: LogitDataset, chosen: Any, last_step: int = 1000) -> StoredSteps:
    return StoredSteps(
        data,
        np.array(chosen),
        Accelerator(cpu=True),
        seed=5,
        per_step=6,
        last_step=last_step,
        read=read,
    )


def tokens_of_step(steps: StoredSteps, step: int) -> list[tuple[int, ...]]:
    (update,) = steps.of_step(step).updates
    return [tuple(item.sequence.token_ids.tolist()) for item in update]


def test_order_is_a_pure_function_of_the_seed(store: Path) -> None:
    data = LogitDataset(store)
    chosen = range(30)
    steps = steps_of(data, chosen)
    tokens_by_step = [tokens_of_step(steps, step) for step in range(1, 11)]
    # A resume in the middle of an epoch, without state.
    resumed_steps = steps_of(LogitDataset(store), chosen)
    assert [tokens_of_step(resumed_steps, step) for step in (7, 8, 9)] == tokens_by_step[6:9]
    expected_epoch = sorted(tuple(TEXTS[index][0]) for index in chosen)
    for epoch in (tokens_by_step[:5], tokens_by_step[5:]):
        assert sorted(ids for step in epoch for ids in step) == expected_epoch, (
            "each one once an epoch"
        )
    assert tokens_by_step[:5] != tokens_by_step[5:]


def test_no_more_than_two_steps_ahead(store: Path) -> None:
    steps = steps_of(LogitDataset(store), range(30), last_step=4)
    ahead = []
    for step in range(1, 5):
        steps.of_step(step)
        ahead.append(sorted(steps._reads))
    assert ahead == [[2, 3], [3, 4], [4], []]


def test_held_out_is_never_learned(material: tiny.Material, store: Path) -> None:
    config = tiny.offline_job(material, store)
    chosen, held_out = split(config, open_stores(config))
    assert len(held_out) == config.eval.prompts
    assert sorted([*chosen, *held_out]) == list(range(len(TEXTS)))
    other_chosen, _ = split(config.model_copy(update={"seed": 1}), open_stores(config))
    assert sorted(other_chosen) != sorted(chosen)


@pytest.mark.parametrize("has_eval_path", [False, True])
def test_nor_is_a_copy_of_what_is_held_out(
    material: tiny.Material, tmp_path: Path, has_eval_path: bool
) -> None:
    """Data with duplicates, or an eval_path that is the training data."""
    teacher = load_model(tiny.job(material, student__model=str(material.teacher)).student)
    texts = TEXTS[:20] * (1 if has_eval_path else 3)
    path = write_store(tmp_path / "rows", teacher, texts)
    changes = {"data__eval_path": str(path)} if has_eval_path else {}
    config = tiny.offline_job(material, path, **changes)
    chosen, held_out = split(config, open_stores(config))
    held_out_ids = {tuple(texts[index][0]) for index in held_out}
    learned_ids = [tuple(texts[index][0]) for index in chosen]
    assert not held_out_ids & set(learned_ids)
    assert sorted(learned_ids) == sorted(
        tuple(ids) for ids, _ in texts if tuple(ids) not in held_out_ids
    )
    max_prompts = len(texts) - (not has_eval_path)
    whole_config = tiny.offline_job(material, path, eval__prompts=max_prompts, **changes)
    with pytest.raises(InvalidInput, match="every sequence of the store"):
        split(whole_config, open_stores(whole_config))


def test_a_store_that_is_deleted_stays_readable(store: Path, tmp_path: Path) -> None:
    store_copy = tmp_path / "copied"
    shutil.copytree(store, store_copy)
    steps = steps_of(LogitDataset(store_copy), range(40))
    expected = [tokens_of_step(steps_of(LogitDataset(store), range(40)), s) for s in range(1, 8)]
    tokens_by_step = [tokens_of_step(steps, 1)]
    shutil.rmtree(store_copy)
    tokens_by_step += [tokens_of_step(steps, step) for step in range(2, 8)]
    assert tokens_by_step == expected


def test_a_damaged_sequence_is_named(store: Path, tmp_path: Path) -> None:
    """The first step with the damaged sequence raises; steps before it are unchanged."""
    store_copy = tmp_path / "copied"
    shutil.copytree(store, store_copy)
    data = LogitDataset(store_copy)
    steps = steps_of(data, range(30))
    order = steps._order
    victim = order.of_step(4, 6)[2]
    shard, _ = data._locate(victim)
    # Change the payload of its rows; the memory map shows the change.
    content = bytearray((store_copy / shard.name).read_bytes())
    offset = content.index(bytes(data.entry(victim).rows[-40:]))
    with (store_copy / shard.name).open("r+b") as stream:
        stream.seek(offset + 30)
        stream.write(bytes([content[offset + 30] ^ 4]))
    good_steps = [tokens_of_step(steps, step) for step in (1, 2, 3)]
    assert good_steps == [
        tokens_of_step(steps_of(LogitDataset(store), range(30)), s) for s in (1, 2, 3)
    ]
    with pytest.raises(Corrupt) as caught:
        steps.of_step(4)
    assert caught.value.message.startswith(f"sequence {victim} of {store_copy}: ")
    assert f"(shard {shard.name})" in caught.value.message
    assert caught.value.hint.startswith(f"run distill store verify {store_copy}")
    wait(steps._reads.values())


def test_conversations_for_exact_match(
    material: tiny.Material, store: Path, tmp_path: Path
) -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"m": TALK}) + "\n")
    config = tiny.offline_job(
        material,
        store,
        eval__metric="exact_match",
        data__eval_prompts=str(path),
        data__messages_column="m",
        data__system="9",
    )
    (prompt,) = load_task_prompts(config, words, 32)
    assert (words.decode(prompt.ids), prompt.answer) == ("S9U1+1=A2<|end|>U2+2=A", "4")
    ids = ModelIds.of_tokenizer(words, words.convert_tokens_to_ids("S"))
    with pytest.raises(InvalidInput, match="has the token 'S'"):
        load_task_prompts(config, words, 32, ids)
