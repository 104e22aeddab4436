"""/v1/completions of a real process, against distributions of another engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from tests.teacher_service.http.asking import FAKE, VOCAB, Site, distributions, tokens
from tests.teacher_service.processes import TeacherProcess

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("completions")
    teacher = TeacherProcess([*FAKE, "--cache-dir", str(folder / "rows")], log=folder / "log")
    yield Site(teacher)
    teacher.close()


def request(prompt: Any, k: int = 5, **fields: Any) -> dict[str, Any]:
    """As TRL and ms-swift send it."""
    fields = {"model": "fake", "max_tokens": 1, "temperature": 1.0, **fields}
    return {"prompt": prompt, "prompt_logprobs": k, **fields}


def assert_rows(rows: Any, prompt: list[int], k: int) -> None:
    """The entries of vLLM: the token and the k likeliest, with the ranks that it would give them.

    A token beyond the k has rank k + 1 at least.
    """
    assert rows[0] is None
    assert len(rows) == len(prompt)
    for row, token, logprobs in zip(rows[1:], prompt[1:], distributions(prompt), strict=True):
        order = np.argsort(-logprobs, kind="stable").tolist()
        expected = {str(token): order.index(token) + 1}
        expected |= {str(token_id): rank for rank, token_id in enumerate(order[:k], 1)}
        assert next(iter(row)) == str(token)
        assert row.keys() == expected.keys()
        for name, entry in row.items():
            assert entry["logprob"] == pytest.approx(logprobs[int(name)], abs=2e-6)
            # With k = 0 the teacher still knows if the token is the likeliest.
            assert entry["rank"] == min(expected[name], max(k, 1) + 1)


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_one_prompt(site: Site, k: int) -> None:
    prompt = tokens(30)
    answer = site.ask(PATH, request(prompt, k))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    (choice,) = content["choices"]
    assert_rows(choice["prompt_logprobs"], prompt, k)
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "", "length")
    assert content["model"] == "fake"
    assert content["usage"] == {"prompt_tokens": 30, "completion_tokens": 0, "total_tokens": 30}


def test_many_prompts_are_answered_in_order(site: Site) -> None:
    prompts = [tokens(length, seed=length) for length in (2, 64, 17, 3, 64)]
    content = site.ask(PATH, request(prompts, 3)).json()
    assert [choice["index"] for choice in content["choices"]] == list(range(5))
    for choice, prompt in zip(content["choices"], prompts, strict=True):
        assert_rows(choice["prompt_logprobs"], prompt, 3)
    assert content["usage"]["prompt_tokens"] == 150


def test_an_answer_of_several_pieces(site: Site) -> None:
    prompts = [tokens(64, seed=seed) for seed in range(40)]
    content = site.ask(PATH, request(prompts, 40)).json()
    assert_rows(content["choices"][39]["prompt_logprobs"], prompts[39], 40)


def test_the_rows_are_those_of_grpc_and_of_the_same_cache(site: Site) -> None:
    prompt = tokens(50, seed=77)
    query = ScoreQuery(np.array(prompt, np.int32), 1, top_k=7, f32=True)
    with TeacherClient([site.teacher.address]) as client:
        block = client.submit(query).result()
    before = site.scored_tokens()
    (choice,) = site.ask(PATH, request(prompt, 7)).json()["choices"]
    assert site.scored_tokens() == before
    assert block.head_ids is not None
    for row, ids, values in zip(
        choice["prompt_logprobs"][1:], block.head_ids, block.head_logprobs, strict=True
    ):
        by_rank = {entry["rank"]: (name, entry["logprob"]) for name, entry in row.items()}
        for rank, (token_id, value) in enumerate(zip(ids, values, strict=True), 1):
            assert by_rank[rank][0] == str(token_id)
            assert by_rank[rank][1] == pytest.approx(float(value), abs=1e-6)


def test_the_model_and_its_longest_sequence(site: Site) -> None:
    content = site.ask("/v1/models").json()
    assert content["object"] == "list"
    assert content["data"][0]["id"] == "fake"
    assert content["data"][0]["max_model_len"] == 64


SIX = list(range(6))


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"max_tokens": 2}, "max_tokens", "generates no tokens"),
        ({"max_tokens": None}, "max_tokens", "it is absent"),
        ({"temperature": 0.7}, "temperature", "temperature 1"),
        ({"temperature": -1}, "temperature", "temperature 1"),
        ({"prompt_logprobs": 41}, "prompt_logprobs", "0 to 40, got 41"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0 to 40, got -1"),
        ({"prompt_logprobs": None}, "prompt_logprobs", "it is absent"),
        ({"prompt_logprobs": "5"}, "prompt_logprobs", "valid integer"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
        ({"n": 2}, "n", "must be 1"),
        ({"stream": True}, "stream", "all rows"),
        ({"echo": True, "logprobs": 3}, "logprobs", "does not support the field"),
        ({"echo": True}, "echo", "prompt_logprobs"),
        ({"top_p": 0.5}, "top_p", "does not support the field"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "does not support the field"),
        ({"prompt": "text"}, "prompt", "list of token ids"),
        ({"prompt": ["text"]}, "prompt", "list of token ids"),
        ({"prompt": []}, "prompt", "list of token ids"),
        ({"prompt": None}, "prompt", "list of token ids"),
        ({"prompt": [1]}, "prompt", "2 to 64 tokens, got 1"),
        ({"prompt": [[1, 2], []]}, "prompt[1]", "2 to 64 tokens, got 0"),
        ({"prompt": [1] * 65}, "prompt", "2 to 64 tokens, got 65"),
        ({"prompt": [SIX, [0, VOCAB]]}, "prompt[1][1]", f"0 to {VOCAB - 1}"),
        ({"prompt": [0, -1]}, "prompt[1]", f"0 to {VOCAB - 1}"),
        ({"prompt": [0, 2**31]}, "prompt[1]", f"0 to {VOCAB - 1}"),
        ({"prompt": [0, 2**80]}, "prompt", "list of integers"),
        ({"prompt": [0, 1.5]}, "prompt", "list of integers"),
        ({"prompt": [0, None]}, "prompt", "list of integers"),
        ({"prompt": [[0, 1], 5]}, "prompt[1]", "list of integers"),
        ({"prompt": [[0, 1], [[2, 3]]]}, "prompt[1]", "list of integers"),
        ({"prompt": [[0, 1]] * 1025}, "prompt", "at most 1024 sequences"),
    ],
)
def test_refusals(site: Site, changed: dict[str, Any], field: str, words: str) -> None:
    answer = site.ask(PATH, {**request(SIX), **changed})
    assert answer.status == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert error == {
        "message": error["message"],
        "type": "INVALID_ARGUMENT",
        "param": field,
        "code": 400,
    }


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"prompt": [1, 2'])
def test_what_is_no_request(site: Site, body: bytes) -> None:
    answer = site.ask(PATH, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "body")


def test_another_model(site: Site) -> None:
    answer = site.ask(PATH, request(SIX, model="gpt-2"))
    assert answer.status == 404
    assert "'fake', not 'gpt-2'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PATH, 405),
        ("POST", "/health", 405),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/inference/v1/generate", 405),
        ("GET", "/", 404),
    ],
)
def test_other_pages(site: Site, method: str, path: str, status: int) -> None:
    answer = site.ask(path, method=method, body=b"{}" if method == "POST" else None)
    assert answer.status == status
    assert "/v1/completions" in answer.json()["error"]["message"]


def test_a_refusal_is_counted_and_the_teacher_goes_on(site: Site, tmp_path: Path) -> None:
    name = 'distill_teacher_requests_total{code="INVALID_ARGUMENT"} '

    def refused() -> float:
        text = site.ask("/metrics").body.decode()
        return float(next(x for x in text.splitlines() if x.startswith(name)).split()[-1])

    before = refused()
    assert site.ask(PATH, request(SIX, 400)).status == 400
    assert refused() == before + 1
    assert site.ask(PATH, request(SIX)).status == 200
