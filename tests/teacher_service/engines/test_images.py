"""Rows of prompts with images, against a plain forward pass of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery, row_key
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from teacher_service.serving.self_test import run_self_test
from tests import tiny_vision

WORDS = tiny_vision.tokenizer()
PICTURES = [tiny_vision.image(0), tiny_vision.image(1, 40, 48), tiny_vision.image(2, 16, 16)]
IMAGE = tiny_vision.START + tiny_vision.IMAGE + tiny_vision.END


@pytest.fixture(scope="module", params=tiny_vision.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def engine(path: Path) -> HfEngine:
    return HfEngine(str(path), device="cpu")


def ids_of(text: str) -> list[int]:
    return list(WORDS(text, add_special_tokens=False)["input_ids"])


def query(prompt: str, answer: str, *images: bytes, **options: Any) -> ScoreQuery:
    """Of a prompt with `IMAGE` for each image; rows of the answer, at its own head ids."""
    before, after = ids_of(prompt), ids_of(answer)
    tokens = np.array(before + after, np.int32)
    return ScoreQuery(tokens, len(before), **{"top_k": 5, "f32": True, **options}, images=images)


def rows(engine: HfEngine, queries: list[ScoreQuery]) -> list[RowBlock]:
    answers = engine.score(
        [
            engine.expand_images(score_query) if score_query.images else score_query
            for score_query in queries
        ]
    )
    assert all(isinstance(answer, RowBlock) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, RowBlock)]


CASES = [
    query(f"{IMAGE}1+2=", "345", PICTURES[0]),
    query(f"12{IMAGE}+{IMAGE}=", "7", PICTURES[1], PICTURES[2]),
    query(f"{IMAGE * 2}3=", "90", PICTURES[2], PICTURES[0]),
    query("1+2=", "345"),
]


def test_rows_are_the_models_own(engine: HfEngine, kind: str) -> None:
    model = tiny_vision.model(kind)
    for case, block in zip(CASES, rows(engine, CASES), strict=True):
        logits = tiny_vision.plain_logits(model, case.token_ids.tolist(), list(case.images))
        expected = logits.log_softmax(-1)[-1 - case.rows : -1].numpy()
        assert block.head_ids is not None
        at_head = np.take_along_axis(expected, block.head_ids.astype(np.int64), 1)
        np.testing.assert_allclose(block.head_logprobs, at_head, atol=1e-5)
        at_token = expected[np.arange(case.rows), case.token_ids[case.start :]]
        np.testing.assert_allclose(block.token_logprobs, at_token, atol=1e-5)


def test_a_batch_with_images_is_each_query_alone(engine: HfEngine) -> None:
    for case, together in zip(CASES, rows(engine, CASES), strict=True):
        alone = rows(engine, [case])[0]
        np.testing.assert_allclose(together.token_logprobs, alone.token_logprobs, atol=1e-5)


def test_a_placeholder_in_scored_text_beside_images(engine: HfEngine) -> None:
    """A student may sample it: it is a token like others, and no image of another query."""
    text = query("1+2=", f"3{IMAGE}5")
    alone = rows(engine, [text])[0]
    together = rows(engine, [CASES[0], text, CASES[1]])
    np.testing.assert_allclose(together[1].token_logprobs, alone.token_logprobs, atol=1e-5)
    expected = rows(engine, CASES[:2])
    for block, expected_block in zip(together[::2], expected, strict=True):
        np.testing.assert_allclose(block.token_logprobs, expected_block.token_logprobs, atol=1e-5)


def test_the_image_changes_the_rows_and_the_key(engine: HfEngine) -> None:
    first_query, second_query = (query(f"{IMAGE}1+2=", "345", picture) for picture in PICTURES[::2])
    first_rows, changed = rows(engine, [first_query, second_query])
    assert np.abs(first_rows.token_logprobs - changed.token_logprobs).max() > 0.01
    keys = {row_key("teacher", 0, image_query) for image_query in (first_query, second_query)}
    assert len(keys) == 2
    again = query(f"{IMAGE}1+2=", "345", bytes(bytearray(PICTURES[0])))
    assert row_key("teacher", 0, again) in keys


def test_a_text_after_images_is_scored_as_before(engine: HfEngine) -> None:
    """The model keeps the positions of its last image; they must not reach another query."""
    before = rows(engine, [CASES[3]])[0]
    rows(engine, [CASES[1]])
    after = rows(engine, [CASES[3]])[0]
    np.testing.assert_array_equal(before.token_logprobs, after.token_logprobs)


def test_an_expanded_query_has_the_rows_of_the_short_one(engine: HfEngine) -> None:
    short_query = CASES[0]
    expanded_query = engine.expand_images(short_query)
    assert expanded_query.rows == short_query.rows
    assert (
        len(expanded_query.token_ids) - len(short_query.token_ids)
        == expanded_query.start - short_query.start
        == 5
    )
    assert expanded_query.images == ()
    assert (
        expanded_query.token_ids[expanded_query.start :].tolist()
        == short_query.token_ids[short_query.start :].tolist()
    )


def test_a_teacher_in_half_precision_sees(path: Path, engine: HfEngine) -> None:
    half = HfEngine(str(path), dtype="bfloat16", device="cpu")
    for half_rows, exact_rows in zip(rows(half, CASES), rows(engine, CASES), strict=True):
        assert np.abs(half_rows.token_logprobs - exact_rows.token_logprobs).max() < 0.3


def test_a_sequence_may_become_too_long(engine: HfEngine) -> None:
    large = tiny_vision.image(0, 64, 64)  # of 64 tokens
    long = query(IMAGE * 8 + "1=", "2", *[large] * 8)
    with pytest.raises(InvalidInput, match=r"more than \d+ tokens, the most that fit") as error:
        engine.expand_images(long)
    assert error.value.field == "images"


def test_a_model_that_does_not_see_is_given_no_images(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own code drops what it sees: here, by a last layer of zeros."""
    tiny_vision.save(tmp_path, kind)
    model = tiny_vision.model(kind)
    for name, weight in model.named_parameters():
        if "merger" in name:
            weight.data.zero_()
    model.save_pretrained(tmp_path)
    assert HfEngine(str(tmp_path), device="cpu").info.placeholder is None
    assert "they do not change its hidden states" in caplog.text


def test_the_engine_says_what_it_reads(engine: HfEngine) -> None:
    assert engine.info.placeholder == WORDS.convert_tokens_to_ids(tiny_vision.IMAGE)
    assert run_self_test(engine) <= 1e-3


def test_the_fingerprint_changes_with_the_processor(path: Path, tmp_path: Path) -> None:
    import shutil

    before = HfEngine(str(path), device="cpu").info
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    settings = copy / "preprocessor_config.json"
    processor_settings = json.loads(settings.read_text())
    settings.write_text(json.dumps(processor_settings | {"image_mean": [0.5, 0.5, 0.5]}))
    assert HfEngine(str(copy), device="cpu").info.fingerprint != before.fingerprint
    settings.unlink()
    without = HfEngine(str(copy), device="cpu").info
    assert without.placeholder is None
    assert without.fingerprint != before.fingerprint
