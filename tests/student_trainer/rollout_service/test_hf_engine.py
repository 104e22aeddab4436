"""The hf engine: samples equal to the trainer's, and weights that are verified or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from protos.errors import Corrupt, InvalidInput, WrongState
from student_trainer.checkpoints.export import export_model
from student_trainer.rollout_client.order import Order
from student_trainer.rollout_client.snapshot import Probe, open_snapshot, seal
from student_trainer.rollout_service.engines.hf import HfRolloutEngine
from student_trainer.rollouts.sampler import Marks, SampledTokens, Sampler, rollout_noise
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.in_process import sample_in_process
from tests.student_trainer.rollout_service.material import (
    assert_same,
    order,
    probe_of,
    snapshot,
    student,
)


@pytest.fixture
def engine(student_path: Path) -> Iterator[HfRolloutEngine]:
    engine = HfRolloutEngine(str(student_path), dtype="float32", device="cpu")
    yield engine
    asyncio.run(engine.close())


async def sample_order(engine: HfRolloutEngine, sent_order: Order) -> list[SampledTokens]:
    entries = [entry async for entry in engine.sample(sent_order)]
    assert [index for index, _ in entries] == list(range(len(sent_order.sequences)))
    return [entry for _, entry in entries]


def load_and_sample(engine: HfRolloutEngine, sent_order: Order) -> list[SampledTokens]:
    async def load_then_sample() -> list[SampledTokens]:
        await engine.load(sent_order.weights)
        return await sample_order(engine, sent_order)

    return asyncio.run(load_then_sample())


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_the_trainers_process(
    student_path: Path, tmp_path: Path, dtype: str, seed: int | None
) -> None:
    engine = HfRolloutEngine(str(student_path), dtype=dtype)
    for number in (1, 2):
        sent_order = order(snapshot(tmp_path, number), number=number, seed=seed)
        expected_sequences = sample_in_process(
            sent_order, student(number), bf16=dtype == "bfloat16"
        )
        for sequence, expected in zip(
            load_and_sample(engine, sent_order), expected_sequences, strict=True
        ):
            assert_same(sequence, expected)
            assert sequence.versions == ((number, len(sequence.token_ids)),)


def test_orders_at_once_do_not_change_each_other(engine: HfRolloutEngine, tmp_path: Path) -> None:
    directory = snapshot(tmp_path, 1)
    orders = [order(directory, first=n * 100, sequences=6 + n) for n in range(3)]

    async def sample_all() -> list[list[SampledTokens]]:
        await engine.load(orders[0].weights)
        return await asyncio.gather(*(sample_order(engine, sent_order) for sent_order in orders))

    for sent_order, sequences in zip(orders, asyncio.run(sample_all()), strict=True):
        for sequence, expected in zip(
            sequences, sample_in_process(sent_order, student(1)), strict=True
        ):
            assert_same(sequence, expected)


def test_turns_of_a_rollout_use_its_random_numbers_and_marks(
    engine: HfRolloutEngine, tmp_path: Path
) -> None:
    """`used` and `marks`, compared with the sampler that `SearchRollouts` calls."""
    sent_order = order(snapshot(tmp_path, 1), stream_tokens=30, marks=("12", "5"))
    requests = [
        replace(turn, used=n, limit=5 + n, number=n) for n, turn in enumerate(sent_order.sequences)
    ]
    sent_order = replace(
        sent_order, sequences=requests, settings=replace(sent_order.settings, batch_tokens=999)
    )
    words = tiny.tokenizer()
    sampler = Sampler(student(1), words, top_k=4, temperature=2.0, draws=3)
    noise = [
        [
            rollout_noise(n, 7, 30, draws=draws)[turn.used :][: turn.limit]
            for n, turn in enumerate(requests)
        ]
        for draws in (False, True)
    ]
    expected_sequences = sampler.write(
        [turn.token_ids for turn in requests],
        [turn.limit for turn in requests],
        noise[0],
        Marks(words, ("12", "5")),
        noise[1],
    )
    sequences = load_and_sample(engine, sent_order)
    assert any(sequence.closed for sequence in sequences)
    for sequence, expected in zip(sequences, expected_sequences, strict=True):
        assert_same(sequence, expected)


def test_an_untied_head_is_loaded(tmp_path: Path) -> None:
    models = []
    for seed in (1, 2):
        model = tiny.model(seed=seed)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        models.append(model)
    path = tiny.save(models[0], tiny.tokenizer(), tmp_path / "model")
    engine = HfRolloutEngine(str(path), dtype="float32")
    sent_order = order(snapshot(tmp_path, 1, models[1]))
    for sequence, expected in zip(
        load_and_sample(engine, sent_order), sample_in_process(sent_order, models[1]), strict=True
    ):
        assert_same(sequence, expected)


def make_experts(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    words = tiny.tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        initializer_range=0.3,
    )
    return Qwen3MoeForCausalLM(config).eval()


def test_weights_that_transformers_converts_are_loaded(tmp_path: Path) -> None:
    """Qwen3-MoE's files store experts separately; the model has a layer's experts in one tensor."""
    path = tiny.save(make_experts(1), tiny.tokenizer(), tmp_path / "model")
    trained_model = make_experts(2)
    directory = tmp_path / "v1"
    export_model(directory, model=trained_model, tokenizer=tiny.tokenizer())
    seal(directory, number=1, dtype="float32", probe=probe_of(trained_model))
    names = [name for name, _ in open_snapshot(directory).tensors()]
    assert any("experts.3.down_proj" in name for name in names)
    engine = HfRolloutEngine(str(path), dtype="float32")
    sent_order = order(directory)
    for sequence, expected in zip(
        load_and_sample(engine, sent_order),
        sample_in_process(sent_order, trained_model),
        strict=True,
    ):
        assert_same(sequence, expected)


def spoil(directory: Path, name: str) -> None:
    """Damage a snapshot in one way."""
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    match name:
        case "half-written":
            (directory / "snapshot.json").unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "one bit":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "another number":
            facts = json.loads((directory / "snapshot.json").read_text())
            (directory / "snapshot.json").write_text(json.dumps({**facts, "number": 9}))
            return
        case "a file elsewhere" | "a list of files":
            facts = json.loads((directory / "snapshot.json").read_text())
            outside_files = {"../v3/model.safetensors": facts["files"]["model.safetensors"]}
            facts["files"] = outside_files if name == "a file elsewhere" else [*facts["files"]]
            (directory / "snapshot.json").write_text(json.dumps(facts))
        case "a link to elsewhere":
            weights.symlink_to(weights.rename(directory.parent / "elsewhere.safetensors"))
        case "another shape":
            tensors["model.norm.weight"] = torch.ones(3)
        case "a missing weight":
            del tensors["model.norm.weight"]
        case "an unknown weight":
            tensors["model.surprise"] = torch.ones(3)
    if name in ("another shape", "a missing weight", "an unknown weight"):
        save_file(tensors, weights)
        seal(directory, number=1, dtype="float32", probe=probe_of(student(1)))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("half-written", "is not a complete snapshot"),
        ("truncated", "checksum of model.safetensors"),
        ("one bit", "checksum of model.safetensors"),
        ("another number", "has version 9, not 1"),
        ("another shape", r"has model.norm.weight in shape \[3\]"),
        ("a missing weight", "has no model.norm.weight"),
        (
            "an unknown weight",
            "has model.surprise, which the model of the rollout service does not have",
        ),
        ("a file elsewhere", "names '../v3/model.safetensors', a file outside the directory"),
        ("a link to elsewhere", "names 'model.safetensors', a file outside the directory"),
        ("a list of files", "is not a complete snapshot"),
    ],
)
def test_a_damaged_snapshot_is_not_sampled(
    engine: HfRolloutEngine, tmp_path: Path, name: str, match: str
) -> None:
    directory = snapshot(tmp_path, 1)
    spoil(directory, name)
    asyncio.run(engine.load(order(snapshot(tmp_path, 3), number=3).weights))
    with pytest.raises(Corrupt, match=match):
        asyncio.run(engine.load(order(directory).weights))
    with pytest.raises(WrongState, match="no verified weights"):
        asyncio.run(sample_order(engine, order(directory)))
    good_order = order(snapshot(tmp_path, 2), number=2)
    for sequence, expected in zip(
        load_and_sample(engine, good_order), sample_in_process(good_order, student(2)), strict=True
    ):
        assert_same(sequence, expected)


@pytest.mark.parametrize("wrong", ["another version", "not finite"])
def test_weights_that_the_probe_disproves_are_not_sampled(
    engine: HfRolloutEngine, tmp_path: Path, wrong: str
) -> None:
    probe = probe_of(student(2))
    if wrong == "not finite":
        probe = Probe(probe.token_ids, torch.full_like(probe.logprobs, torch.nan))
    directory = snapshot(tmp_path, 1, probe=probe)
    with pytest.raises(Corrupt, match="does not have the weights"):
        asyncio.run(engine.load(order(directory).weights))
    with pytest.raises(WrongState):
        asyncio.run(sample_order(engine, order(directory)))


def test_closing_the_iterator_ends_the_sampling(engine: HfRolloutEngine, tmp_path: Path) -> None:
    """It ends at the next token, not after the batch's 2,000 tokens or the 50 batches."""
    long_order = order(snapshot(tmp_path, 1), limit=2000, batch_tokens=1, sequences=50)
    short_order = order(long_order.weights.directory, sequences=1)

    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    engine._model.register_forward_hook(count)

    async def scenario() -> None:
        await engine.load(long_order.weights)
        sampling = asyncio.create_task(sample_order(engine, long_order))
        while forwards < 5:
            await asyncio.sleep(0.001)
        sampling.cancel()
        await sample_order(engine, short_order)

    asyncio.run(scenario())
    assert forwards < 2000


def test_a_slow_client_keeps_no_other_waiting(engine: HfRolloutEngine, tmp_path: Path) -> None:
    directory = snapshot(tmp_path, 1)
    slow_order, other_order = order(directory, batch_tokens=1), order(directory, first=50)

    async def scenario() -> None:
        await engine.load(slow_order.weights)
        async with aclosing(engine.sample(slow_order)) as sequences:
            await anext(sequences)
            await sample_order(engine, other_order)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": "/nowhere"}, "--model"),
        ({"dtype": "float16"}, "--dtype"),
        ({"device": "cuda:99"}, "--device"),
        ({"device": "gpu"}, "--device"),
    ],
)
def test_a_wrong_option_is_named(student_path: Path, options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HfRolloutEngine(**{"model": str(student_path), **options})
    assert caught.value.field == field
