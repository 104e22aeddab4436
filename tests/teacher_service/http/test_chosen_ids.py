"""vLLM's /inference/v1/generate of a real process, against distributions of another engine.

The endpoint engine, made for vLLM's own server, reads the same page: test_endpoint_client.py.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.teacher_service.http.asking import FAKE, VOCAB, Site, distributions, tokens
from tests.teacher_service.processes import TeacherProcess

PATH = "/inference/v1/generate"
SIX = list(range(6))
IDS = "sampling_params.prompt_logprob_token_ids"

START = "sampling_params.prompt_logprob_start"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    log = tmp_path_factory.mktemp("chosen") / "log"
    teacher = TeacherProcess([*FAKE, "--no-cache"], log=log)
    yield Site(teacher)
    teacher.close()


def request(token_ids: Any, ids: Any, start: int = 0, **sampling: Any) -> dict[str, Any]:
    chosen = {"prompt_logprob_token_ids": ids, "prompt_logprob_start": start}
    fields = {"max_tokens": 1, "temperature": 0, "detokenize": False, **chosen, **sampling}
    return {"model": "fake", "token_ids": token_ids, "sampling_params": fields}


@pytest.mark.parametrize("start", [0, 10, 38])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_log_probs_of_the_ids(site: Site, start: int, count: int) -> None:
    token_ids = tokens(40)
    ids = np.random.default_rng(start).integers(0, VOCAB, (39 - start, count))
    ids[:, -1] = ids[:, 0]  # the same twice, as of a token that is in the head as well
    answer = site.ask(PATH, request(token_ids, ids.tolist(), start))
    assert answer.status == 200
    content = answer.json()
    data = io.BytesIO(base64.b64decode(content["prompt_token_id_logprobs"], validate=True))
    values = np.load(data, allow_pickle=False)
    assert values.dtype == np.float32
    expected = np.take_along_axis(distributions(token_ids)[start:], ids, axis=1)
    np.testing.assert_allclose(values, expected, atol=2e-6)
    assert content["choices"][0]["token_ids"] == []
    assert content["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        (request(SIX, None), IDS, "5 lists of ids"),
        (request(SIX, [[1]] * 4), IDS, "5 lists of ids"),
        (request(SIX, [[1]] * 5, start=2), IDS, "3 lists of ids"),
        (request(SIX, [[1]] * 4 + [[1, 2]]), IDS, "all of one length"),
        (request(SIX, [[]] * 5), IDS, "5 lists of ids"),
        (request(SIX, [1] * 5), IDS, "5 lists of ids"),
        (request(SIX, [[1.5]] * 5), IDS, "5 lists of ids"),
        (request(SIX, [[VOCAB]] * 5), IDS, f"0 to {VOCAB - 1}"),
        (request(SIX, [[0, -1]] * 5), IDS, f"0 to {VOCAB - 1}"),
        (request(SIX, [[*range(41)]] * 5), IDS, "1 to 40 ids, got 41"),
        (request(SIX, [[1]] * 5, start=-1), START, "greater than or equal to 0"),
        (request(SIX, [[1]], start=5), START, "0 to 4 for 6 tokens, got 5"),
        (request([1], [[1]]), "token_ids", "2 to 64 tokens, got 1"),
        (request("text", [[1]]), "token_ids", "list of integers"),
        (request([SIX], [[1]]), "token_ids", "list of integers"),
        (
            request(SIX, [[1]] * 5, max_tokens=5),
            "sampling_params.max_tokens",
            "generates no tokens",
        ),
        (request(SIX, [[1]] * 5, temperature=2), "sampling_params.temperature", "temperature 1"),
        (request(SIX, [[1]] * 5, logprobs=2), "sampling_params.logprobs", "not support the field"),
        ({**request(SIX, [[1]] * 5), "stream": True}, "stream", "all rows"),
        ({**request(SIX, [[1]] * 5), "output_mode": "text"}, "output_mode", "'tokens'"),
        ({**request(SIX, [[1]] * 5), "features": {}}, "features", "not support the field"),
    ],
)
def test_refusals(site: Site, changed: dict[str, Any], field: str, words: str) -> None:
    error = site.ask(PATH, changed).json()["error"]
    assert error["code"] == 400, error
    assert words in error["message"]
    assert error["param"] == field


def test_another_model(site: Site) -> None:
    assert site.ask(PATH, {**request(SIX, [[1]] * 5), "model": "gpt-2"}).status == 404
