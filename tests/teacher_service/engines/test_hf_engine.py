"""The transformers engine against model(...).logits; padding, fingerprints and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from teacher_service.serving.self_test import run_self_test
from tests.teacher_service.tiny_model import VOCAB_SIZE, save_tiny_model


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


def rows(engine: HfEngine, queries: list[ScoreQuery]) -> list[RowBlock]:
    answers = engine.score(queries)
    for answer in answers:
        assert isinstance(answer, RowBlock), answer
    return [answer for answer in answers if isinstance(answer, RowBlock)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> HfEngine:
    return HfEngine(str(tiny_model), device="cpu")


@pytest.mark.parametrize("start", [1, 5, 39])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_are_the_models_own(
    engine: HfEngine, tiny_model: Path, start: int, temperature: float
) -> None:
    tokens = sequences([40])[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    # Row t is the distribution of token t given the tokens before it.
    expected = (logits / temperature).log_softmax(-1)[start - 1 : 39].numpy()
    head = np.argsort(np.random.default_rng(1).random((40 - start, VOCAB_SIZE)))[:, :6]
    teachers, students = rows(
        engine,
        [
            ScoreQuery(tokens, start, top_k=5, temperature=temperature),
            ScoreQuery(tokens, start, head_ids=head.astype(np.int32), temperature=temperature),
        ],
    )
    for block in (teachers, students):
        assert block.head_ids is not None
        exact = np.take_along_axis(expected, block.head_ids.astype(np.int64), 1)
        np.testing.assert_allclose(block.head_logprobs, exact, atol=1e-5, rtol=1e-5)
        tail = np.log1p(-np.exp(exact).sum(1))
        np.testing.assert_allclose(block.tail_logmass, tail, atol=1e-3)
        at_token = expected[np.arange(40 - start), tokens[start:]]
        np.testing.assert_allclose(block.token_logprobs, at_token, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(teachers.head_ids, np.argsort(-expected, 1)[:, :5])
    np.testing.assert_array_equal(students.head_ids, head)


def test_padding_and_company_do_not_change_rows(engine: HfEngine) -> None:
    queries = [ScoreQuery(tokens, 1, top_k=4) for tokens in sequences([2, 33, 7, 90])]
    for query, together in zip(queries, rows(engine, queries), strict=True):
        alone = rows(engine, [query])[0]
        np.testing.assert_allclose(together.head_logprobs, alone.head_logprobs, atol=1e-5)
        np.testing.assert_allclose(together.tail_logmass, alone.tail_logmass, atol=1e-5)


def test_batch_invariant_rows_are_the_same_bits(tiny_model: Path) -> None:
    engine = HfEngine(str(tiny_model), device="cpu", batch_invariant=True)
    queries = [ScoreQuery(tokens, 1, top_k=4) for tokens in sequences([2, 33, 7, 90])]
    for query, together in zip(queries, rows(engine, queries), strict=True):
        alone = rows(engine, [query])[0]
        assert together.head_logprobs.tobytes() == alone.head_logprobs.tobytes()
        assert together.tail_logmass.tobytes() == alone.tail_logmass.tobytes()
        assert together.token_logprobs.tobytes() == alone.token_logprobs.tobytes()
    run_self_test(engine)


def test_tied_weights(tmp_path: Path) -> None:
    run_self_test(HfEngine(str(save_tiny_model(tmp_path, tied=True)), device="cpu"))


def test_queries_of_several_kinds_together(engine: HfEngine) -> None:
    """Those of one kind share the head's work; every answer is still its query's own."""
    heads = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4, 6]], np.int32)
    queries = [
        query
        for tokens in sequences([12, 20, 12])
        for query in (
            ScoreQuery(tokens, len(tokens) - 4, head_ids=heads),
            ScoreQuery(tokens, 5, top_k=3),
            ScoreQuery(tokens, 5, top_k=3, temperature=0.5),
            ScoreQuery(tokens, 2, top_k=4),
        )
    ]
    for query, together in zip(queries, rows(engine, queries), strict=True):
        alone = rows(engine, [query])[0]
        assert together.head_logprobs.shape == (query.rows, query.k)
        np.testing.assert_array_equal(together.head_ids, alone.head_ids)
        np.testing.assert_allclose(together.head_logprobs, alone.head_logprobs, atol=1e-5)
        np.testing.assert_allclose(together.token_logprobs, alone.token_logprobs, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_one_bad_sequence_of_a_batch(tmp_path: Path, batch_invariant: bool) -> None:
    path = save_tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    engine = HfEngine(str(path), device="cpu", batch_invariant=batch_invariant)
    good, bad = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 7, 4, 5], np.int32)
    answers = engine.score([ScoreQuery(ids, 1, top_k=2) for ids in (good, bad, good)])
    assert isinstance(answers[1], Corrupt)
    assert answers[1].field.startswith("token_ids[")
    assert isinstance(answers[0], RowBlock)
    assert isinstance(answers[2], RowBlock)


def edit_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def test_refusals_say_what_and_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    own_code = shutil.copytree(tiny_model, tmp_path / "own_code")
    edit_config(own_code, auto_map={"AutoModelForCausalLM": "evil.Model"})
    pickled = shutil.copytree(tiny_model, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    unknown = shutil.copytree(tiny_model, tmp_path / "unknown")
    edit_config(unknown, model_type="no_such_thing", architectures=["NoSuchThing"])
    cut = shutil.copytree(tiny_model, tmp_path / "cut")
    with (cut / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    partial = shutil.copytree(tiny_model, tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    wrong_type = shutil.copytree(tiny_model, tmp_path / "wrong_type")
    edit_config(wrong_type, hidden_size="many")
    no_heads = shutil.copytree(tiny_model, tmp_path / "no_heads")
    edit_config(no_heads, num_attention_heads=0)
    narrow = shutil.copytree(tiny_model, tmp_path / "narrow")
    edit_config(narrow, intermediate_size=8)
    silent = shutil.copytree(tiny_model, tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    garbled = shutil.copytree(tiny_model, tmp_path / "garbled")
    (garbled / "tokenizer.json").write_text("garbage")
    lost = shutil.copytree(tiny_model, tmp_path / "lost")
    (lost / "model.safetensors").rename(lost / "model.safetensors.index.json")
    cases = {
        str(garbled): "its tokenizer: ",
        str(lost): "is not JSON",
        str(silent): "no tokenizer",
        str(own_code): "own Python code",
        str(pickled): "no .safetensors weights",
        str(unknown): "cannot load",
        str(cut): "cannot load",
        str(wrong_type): "cannot load .*hidden_size",
        str(no_heads): "cannot load",
        str(narrow): "cannot load",
        str(partial): "no weights for model.layers.1.mlp.up_proj",
        str(tmp_path / "absent"): "there is no directory",
        str(tmp_path): "no config.json",
    }
    for model, message in cases.items():
        with pytest.raises(InvalidInput, match=message) as caught:
            HfEngine(model, device="cpu")
        assert caught.value.field == "--model"
        assert caught.value.hint


def test_wrong_settings_are_named(tiny_model: Path) -> None:
    for settings in ({"dtype": "float7"}, {"device": "nonsense"}, {"device": "cuda:99"}):
        with pytest.raises(InvalidInput) as caught:
            HfEngine(str(tiny_model), **settings)
        assert caught.value.field == f"--{next(iter(settings))}"


def test_a_head_that_is_not_one_linear_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path)
    forward = transformers.Qwen3ForCausalLM.forward

    def squared(*inputs: Any, **options: Any) -> Any:
        out = forward(*inputs, **options)
        out.logits = out.logits.square()
        return out

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "forward", squared)
    with pytest.raises(InvalidInput, match="not one linear layer of its hidden states, scaled or"):
        HfEngine(str(path), device="cpu")


def test_the_limit_of_a_model_of_text_and_images_is_in_its_text_config(tiny_model: Path) -> None:
    """As Gemma 3 is: without it, 131,072 tokens would be taken for 4,096."""
    text = transformers.Qwen3Config(max_position_embeddings=131_072)
    image_text_config = transformers.Gemma3Config(text_config={"max_position_embeddings": 131_072})
    engine = HfEngine(str(tiny_model), device="cpu")
    for config in (text, image_text_config):
        engine._model.config = config
        assert engine._max_length() == 131_072
    # XLNet says -1 for no limit.
    engine._model.config = transformers.Qwen3Config(max_position_embeddings=-1)
    assert engine._max_length() == 4096


def test_rows_do_not_depend_on_a_longer_query_that_has_other_rotary_factors(
    tiny_model: Path, tmp_path: Path
) -> None:
    """LongRoPE; the self-test, with 23 tokens beside 7, passes too."""
    switch = 16
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path)
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": switch,
        "short_factor": [1.0] * 8,
        "long_factor": [8.0] * 8,
    }
    config = transformers.Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=switch,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Phi3ForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=0.5)
    model.save_pretrained(tmp_path)
    engine = HfEngine(str(tmp_path), device="cpu")
    run_self_test(engine)
    queries = [ScoreQuery(tokens, 1, top_k=4) for tokens in sequences([12, 17, 18, 40, 9])]
    for together, query in zip(rows(engine, queries), queries, strict=True):
        (alone,) = rows(engine, [query])
        np.testing.assert_allclose(together.head_logprobs, alone.head_logprobs, atol=1e-3)
        with torch.no_grad():
            ids = torch.from_numpy(query.token_ids.astype(np.int64))[None, :-1]
            exact = model(input_ids=ids, use_cache=False).logits[0].log_softmax(1)
        token_logprobs = exact.gather(1, torch.from_numpy(query.token_ids[1:, None]).long())[:, 0]
        np.testing.assert_allclose(together.token_logprobs, token_logprobs.numpy(), atol=1e-3)
