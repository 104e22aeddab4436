"""SGLang's /generate of a real process, against distributions of another engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.teacher_service.http.asking import FAKE, VOCAB, Site, distributions, tokens
from tests.teacher_service.processes import TeacherProcess

PATH = "/generate"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    log = tmp_path_factory.mktemp("generate") / "log"
    teacher = TeacherProcess([*FAKE, "--no-cache"], log=log)
    yield Site(teacher)
    teacher.close()


def request(input_ids: Any, **fields: Any) -> dict[str, Any]:
    """As slime sends it."""
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    return {
        "input_ids": input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
        **fields,
    }


def assert_entries(entries: Any, ids: list[int], logprobs: Any) -> None:
    assert [entry[1:] for entry in entries] == [[token_id, None] for token_id in ids]
    np.testing.assert_allclose([entry[0] for entry in entries], logprobs[ids], atol=2e-6)


@pytest.mark.parametrize("start", [0, 1, 30, 38])
def test_the_log_probs_of_the_tokens(site: Site, start: int) -> None:
    ids = tokens(40)
    answer = site.ask(PATH, request(ids, logprob_start_len=start))
    assert answer.status == 200
    meta = answer.json()["meta_info"]
    first, *scored_entries = meta["input_token_logprobs"]
    assert first == [None, ids[start], None]
    for entry, token, logprobs in zip(
        scored_entries, ids[start + 1 :], distributions(ids)[start:], strict=True
    ):
        assert_entries([entry], [token], logprobs)
    assert meta["output_token_logprobs"] == []
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (40, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert "input_top_logprobs" not in meta
    assert answer.json()["text"] == ""


@pytest.mark.parametrize("start", [0, 10])
def test_heads(site: Site, start: int) -> None:
    ids, chosen = tokens(40), [96, 3, 50]
    fields = {"top_logprobs_num": 6, "token_ids_logprob": chosen, "logprob_start_len": start}
    meta = site.ask(PATH, request(ids, **fields)).json()["meta_info"]
    heads = [meta["input_top_logprobs"], meta["input_token_ids_logprobs"]]
    assert [head[0] for head in heads] == [None, None]
    for top, given_entries, logprobs in zip(
        heads[0][1:], heads[1][1:], distributions(ids)[start:], strict=True
    ):
        assert_entries(top, np.argsort(-logprobs, kind="stable")[:6].tolist(), logprobs)
        assert_entries(given_entries, chosen, logprobs)
    assert meta["output_top_logprobs"] == meta["output_token_ids_logprobs"] == []


def test_several_sequences(site: Site) -> None:
    sequences = [tokens(length, seed=length) for length in (2, 64, 9)]
    content = site.ask(PATH, request(sequences, top_logprobs_num=2)).json()
    for answer, ids in zip(content, sequences, strict=True):
        assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == ids
        for top, logprobs in zip(
            answer["meta_info"]["input_top_logprobs"][1:], distributions(ids), strict=True
        ):
            assert_entries(top, np.argsort(-logprobs, kind="stable")[:2].tolist(), logprobs)


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"sampling_params": {}}, "sampling_params.max_new_tokens", "it is absent"),
        (
            {"sampling_params": {"max_new_tokens": 8}},
            "sampling_params.max_new_tokens",
            "generates none",
        ),
        (
            {"sampling_params": {"max_new_tokens": 0, "temperature": 0.8}},
            "sampling_params.temperature",
            "temperature 1",
        ),
        (
            {"sampling_params": {"max_new_tokens": 0, "top_p": 0.5}},
            "sampling_params.top_p",
            "does not have the field",
        ),
        ({"return_logprob": False}, "return_logprob", "log-probs only"),
        ({"logprob_start_len": -1}, "logprob_start_len", "0 to 4 for 6 tokens, got -1"),
        ({"logprob_start_len": 5}, "logprob_start_len", "0 to 4 for 6 tokens, got 5"),
        ({"top_logprobs_num": 41}, "top_logprobs_num", "1 to 40, got 41"),
        ({"top_logprobs_num": -1}, "top_logprobs_num", "greater than or equal to 0"),
        ({"token_ids_logprob": [VOCAB]}, "token_ids_logprob", f"0 to {VOCAB - 1}"),
        ({"token_ids_logprob": [3, 3]}, "token_ids_logprob", "same id twice"),
        ({"token_ids_logprob": []}, "token_ids_logprob", "0 ids"),
        ({"token_ids_logprob": [1.5]}, "token_ids_logprob.0", "valid integer"),
        ({"return_text_in_logprobs": True}, "return_text_in_logprobs", "ids"),
        ({"stream": True}, "stream", "all rows"),
        ({"image_data": ["x"]}, "image_data", "does not have the field"),
        ({"text": "x"}, "text", "does not have the field"),
        ({"input_ids": [1]}, "input_ids", "2 to 64 tokens, got 1"),
        ({"input_ids": [[1, 2], [1, VOCAB]]}, "input_ids[1][1]", f"0 to {VOCAB - 1}"),
    ],
)
def test_refusals(site: Site, changed: dict[str, Any], field: str, words: str) -> None:
    answer = site.ask(PATH, {**request(list(range(6))), **changed})
    error = answer.json()["error"]
    assert answer.status == 400, error
    assert words in error["message"]
    assert error["param"] == field
