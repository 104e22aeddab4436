"""The endpoint engine and a server with faults: limits of rate, outages, wrong answers.

tests/vllm/test_endpoint.py has the real server. Here a small one answers with the same forms, from
the rows of the fake engine, and fails as the test tells it.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, InvalidInput, Unavailable
from protos.rows.codec import RowBlock
from teacher_service.engines import endpoint_http
from teacher_service.engines.endpoint import EndpointEngine
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.models.loading import load_vocabulary
from tests.scraping import metrics_address, scrape
from tests.teacher_service.conftest import StartTeacher

Answer = dict[str, Any]


class VllmLike(ThreadingHTTPServer):
    """Answers from the fake engine. `faults`: (status, headers) of the next answers to POST.

    `change` may alter an answer before it is sent.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = FakeEngine(FakeSettings(vocab=vocab))
        self.vocab = vocab
        self.faults: list[tuple[int, dict[str, str]]] = []
        self.change: Callable[[Answer], Answer] = lambda answer: answer
        self.requests = 0
        self.echoes = False  # and knows no `prompt_logprobs`
        self.shut = False  # for chosen ids, as vLLM without --enable-scale-out

    def answer(self, path: str, body: Answer) -> tuple[int, Answer]:
        tokens = np.array(body.get("prompt", body.get("token_ids")), np.int32)
        if (tokens >= self.vocab).any():
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        if path == "/v1/completions":
            if self.echoes:
                return 200, self._echo(tokens, body.get("logprobs"))
            if "prompt_logprobs" not in body:
                return 200, {"choices": [{"text": "a text"}]}
            return 200, self._likeliest(tokens, body["prompt_logprobs"])
        if self.shut:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        sampling = body["sampling_params"]
        ids = np.array(sampling["prompt_logprob_token_ids"], np.int32)
        start = sampling["prompt_logprob_start"] + 1
        logprobs = self._logprobs(tokens, start)
        buffer = io.BytesIO()
        np.save(buffer, np.take_along_axis(logprobs, ids, axis=1))
        return 200, {"prompt_token_id_logprobs": base64.b64encode(buffer.getvalue()).decode()}

    def _logprobs(self, tokens: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
        """All log-probs [T - start, V]."""
        everything = np.tile(np.arange(self.vocab, dtype=np.int32), (len(tokens) - start, 1))
        [block] = self.engine.score([ScoreQuery(tokens, start, head_ids=everything)])
        assert isinstance(block, RowBlock)
        return block.head_logprobs

    def _likeliest(self, tokens: np.ndarray[Any, Any], k: int) -> Answer:
        """As vLLM: the sampled token too, with its rank, if it is not among the k likeliest."""
        rows: list[Answer | None] = [None]
        for row, token in zip(self._logprobs(tokens, 1), tokens[1:], strict=True):
            order = np.argsort(-row, kind="stable")
            ranks = {int(token_id): rank + 1 for rank, token_id in enumerate(order)}
            chosen = [int(token), *(int(token_id) for token_id in order[:k])]
            rows.append(
                {
                    str(token_id): {"logprob": float(row[token_id]), "rank": ranks[token_id]}
                    for token_id in chosen
                }
            )
        return {"choices": [{"prompt_logprobs": rows}]}

    def _echo(self, tokens: np.ndarray[Any, Any], k: int | None) -> Answer:
        """As a server of the old interface: at most five ids, the sampled one in the last place."""
        if k is None:
            return {"choices": [{"text": "a text", "logprobs": None}]}
        rows: list[Any] = [None]
        for row, token in zip(self._logprobs(tokens, 1), tokens[1:], strict=True):
            best = [int(token_id) for token_id in np.argsort(-row, kind="stable")[: min(k, 5)]]
            ids = best if token in best else [*best[:-1], int(token)]
            rows.append({f"token_id:{token_id}": float(row[token_id]) for token_id in ids})
        scored = [
            None,
            *(
                row[f"token_id:{token_id}"]
                for row, token_id in zip(rows[1:], tokens[1:], strict=True)
            ),
        ]
        names = [f"token_id:{token_id}" for token_id in (*tokens, 0)]  # and a generated one
        logprobs = {"tokens": names, "token_logprobs": [*scored, -1.0], "top_logprobs": [*rows, {}]}
        return {"choices": [{"text": "", "logprobs": logprobs}]}


class _Handler(BaseHTTPRequestHandler):
    server: VllmLike

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "m", "root": "r", "max_model_len": 129}]}, {})

    def do_POST(self) -> None:
        self.server.requests += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.faults:
            status, headers = self.server.faults.pop(0)
            self._send(status, {"error": {"message": "told to fail"}}, headers)
            return
        status, answer = self.server.answer(self.path, body)
        self._send(status, self.server.change(answer), {})

    def _send(self, status: int, answer: Answer, headers: dict[str, str]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tiny_model: Path) -> Iterator[VllmLike]:
    with VllmLike(vocab=len(load_vocabulary(tiny_model)) + 3) as vllm_like:
        thread = threading.Thread(target=vllm_like.serve_forever, daemon=True)
        thread.start()
        yield vllm_like
        vllm_like.shutdown()
        thread.join()


def engine_of(server: VllmLike, tokenizer: Path, **options: Any) -> EndpointEngine:
    return EndpointEngine(
        f"http://127.0.0.1:{server.server_port}",
        tokenizer=str(tokenizer),
        **{"served_model": "", "max_top_k": 16, "step_tokens": 64, **options},
    )


@pytest.fixture
def engine(server: VllmLike, tiny_model: Path) -> Iterator[EndpointEngine]:
    endpoint_engine = engine_of(server, tiny_model)
    yield endpoint_engine
    endpoint_engine.close()


def query(server: VllmLike, **head: Any) -> ScoreQuery:
    tokens = np.random.default_rng(0).integers(0, server.vocab, 40).astype(np.int32)
    return ScoreQuery(tokens, 3, **(head or {"top_k": 4}))


def test_the_width_and_the_limits_are_found_by_asking(
    engine: EndpointEngine, server: VllmLike
) -> None:
    """The logits are three ids wider than the tokenizer."""
    assert engine.info.vocab_size == server.vocab
    assert engine.info.max_length == 128
    assert engine.info.limits.max_top_k == 16
    assert engine.info.limits.max_chosen_ids == 16


def test_the_sampled_token_is_no_part_of_the_head(engine: EndpointEngine, server: VllmLike) -> None:
    """A server sends k + 1 ids where the sampled token is unlikely; the head has the k likeliest.

    With the sampled token in the head, the Top-k KL would be biased.
    """
    score_query = query(server)
    [rows], [expected] = engine.score([score_query]), server.engine.score([score_query])
    assert isinstance(rows, RowBlock)
    assert isinstance(expected, RowBlock)
    outside = (rows.head_ids != score_query.token_ids[3:, None]).all(axis=1)
    assert outside.sum() > 20
    np.testing.assert_array_equal(rows.head_ids, expected.head_ids)
    np.testing.assert_allclose(rows.head_logprobs, expected.head_logprobs, atol=1e-5)
    np.testing.assert_allclose(rows.token_logprobs, expected.token_logprobs, atol=1e-5)
    np.testing.assert_allclose(np.exp(rows.tail_logmass), np.exp(expected.tail_logmass), atol=1e-5)


def test_a_server_that_only_echoes(server: VllmLike, tiny_model: Path) -> None:
    """Of five ids, four are a head that does not depend on the sampled token."""
    server.echoes, server.shut = True, True
    engine = engine_of(server, tiny_model)
    assert (engine.info.limits.max_top_k, engine.info.limits.max_chosen_ids) == (4, 0)
    score_query = query(server, top_k=4)
    [rows], [expected] = engine.score([score_query]), server.engine.score([score_query])
    assert isinstance(rows, RowBlock)
    assert isinstance(expected, RowBlock)
    np.testing.assert_array_equal(rows.head_ids, expected.head_ids)
    np.testing.assert_allclose(rows.head_logprobs, expected.head_logprobs, atol=1e-5)
    np.testing.assert_allclose(rows.token_logprobs, expected.token_logprobs, atol=1e-5)
    engine.close()


def _echoed(answer: Answer) -> Answer | None:
    logprobs: Answer | None = answer["choices"][0]["logprobs"] if "choices" in answer else None
    return logprobs


def _texts(answer: Answer) -> Answer:
    """Name tokens by their texts, which several tokens share."""
    if logprobs := _echoed(answer):
        logprobs["tokens"] = ["the" for _ in logprobs["tokens"]]
    return answer


def _with_bos(answer: Answer) -> Answer:
    """Put a token before the prompt."""
    if logprobs := _echoed(answer):
        for name in logprobs:
            logprobs[name] = [None, *logprobs[name]]
    return answer


@pytest.mark.parametrize("change", [_texts, _with_bos])
def test_an_echo_of_something_else_is_refused(
    server: VllmLike, tiny_model: Path, change: Callable[[Answer], Answer]
) -> None:
    server.echoes, server.change = True, change
    with pytest.raises(InvalidInput, match="returns no log-probs of prompts"):
        engine_of(server, tiny_model)


def test_a_teacher_in_front_of_it(
    server: VllmLike, tiny_model: Path, start_teacher: StartTeacher
) -> None:
    """The limits reach the client, which gets rows; the tokens that were asked for are counted."""
    teacher = start_teacher(
        *("--engine", "endpoint", "--model", f"http://127.0.0.1:{server.server_port}"),
        *("--tokenizer", str(tiny_model), "--max-top-k", "8", "--metrics-port", "0"),
    )
    with TeacherClient(teacher.address) as client:
        info = client.info()
        assert (info.engine, info.model, info.max_top_k) == ("endpoint", "m", 8)
        assert (info.max_chosen_ids, info.max_tail_samples) == (8, 0)
        assert info.only_temperature_one
        before = scrape(metrics_address(teacher.log))["distill_teacher_endpoint_tokens"]
        score_query = query(server)
        [rows], [expected] = client.score([score_query]), server.engine.score([score_query])
    assert isinstance(expected, RowBlock)
    np.testing.assert_array_equal(rows.head_ids, expected.head_ids)
    after = scrape(metrics_address(teacher.log))["distill_teacher_endpoint_tokens"]
    assert after - before == len(score_query.token_ids)


def test_a_limit_of_rate_and_an_outage_are_waited_out(
    engine: EndpointEngine, server: VllmLike
) -> None:
    server.faults = [(429, {"retry-after": "0.5"}), (503, {}), (500, {}), (429, {})]
    before = server.requests
    [answer] = engine.score([query(server)])
    assert isinstance(answer, RowBlock)
    assert server.requests - before == 5


def test_an_outage_that_lasts_is_told(
    server: VllmLike, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_http, "ATTEMPTS", 2)
    engine = engine_of(server, tiny_model)
    server.faults = [(503, {})] * 1000
    [answer] = engine.score([query(server)])
    assert isinstance(answer, Unavailable)
    assert "HTTP 503: told to fail" in answer.message
    server.faults = []
    [answer] = engine.score([query(server)])
    assert isinstance(answer, RowBlock)
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {}, "has no prompt_logprobs"),
        (lambda _: {"choices": [{"prompt_logprobs": None}]}, "has no prompt_logprobs"),
        (lambda _: {"choices": [{"prompt_logprobs": [None]}]}, "0 rows in place of 37"),
        (lambda _: {"choices": [{"prompt_logprobs": [{}] * 40}]}, "cannot be read"),
        (lambda a: _scaled(a, -1.0), "of a softmax are at most 0; start its server"),
        (lambda a: _scaled(a, 0.01), "the probabilities of the head ids have the sum"),
        (lambda a: _renamed(a, "-3"), "head_ids from -3 to"),
        (lambda a: _renamed(a, "99999"), "to 99999, but there are"),
        (lambda a: _renamed(a, str(1 << 40)), "cannot be read"),
        (lambda a: _renamed(a, "1.5"), "invalid literal"),
        (lambda a: _with_entry(a, logprob=[]), "with a sequence"),
        (lambda a: _with_entry(a, logprob="a text"), "could not convert"),
        (lambda a: _with_entry(a, logprob=float("nan")), "a log-prob of the head ids is nan"),
        (lambda a: _with_entry(a, rank="1"), "cannot be read"),
        (lambda _: [1], "has no prompt_logprobs"),
        (lambda a: _doubled(a), "an id twice"),
    ],
)
def test_an_answer_that_is_no_row_is_corrupt(
    engine: EndpointEngine, server: VllmLike, change: Callable[[Answer], Answer], message: str
) -> None:
    server.change = change
    [answer] = engine.score([query(server)])
    assert isinstance(answer, Corrupt)
    assert message in answer.message


def _scaled(answer: Answer, factor: float) -> Answer:
    """As raw logits would be: above 0, or with probabilities that sum to more than 1."""
    for row in filter(None, answer["choices"][0]["prompt_logprobs"]):
        for entry in row.values():
            entry["logprob"] *= factor
    return answer


def _rows_of(answer: Answer) -> list[Answer]:
    return [row for row in answer["choices"][0]["prompt_logprobs"] if row]


def _first_of_head(row: Answer) -> str:
    return next(name for name, entry in row.items() if entry["rank"] == 1)


def _renamed(answer: Answer, name: str) -> Answer:
    """Give the likeliest id of a row, which is not its token, another name."""
    row = next(row for row in _rows_of(answer)[5:] if next(iter(row)) != _first_of_head(row))
    row[name] = row.pop(_first_of_head(row))
    return answer


def _with_entry(answer: Answer, **values: object) -> Answer:
    row = _rows_of(answer)[5]
    row[_first_of_head(row)].update(values)
    return answer


def _doubled(answer: Answer) -> Answer:
    """Name one id in two ways, in the place of the second likeliest."""
    row = next(
        row
        for row in _rows_of(answer)[5:]
        if all(row[name]["rank"] > 2 or name != next(iter(row)) for name in row)
    )
    second = next(name for name, entry in row.items() if entry["rank"] == 2)
    entry = row.pop(second)
    row[f"0{_first_of_head(row)}"] = entry
    return answer


def test_chosen_ids_of_another_shape_are_corrupt(engine: EndpointEngine, server: VllmLike) -> None:
    heads = np.tile(np.arange(3, dtype=np.int32), (37, 1))
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((37, 3), np.float32))
    wrong = base64.b64encode(buffer.getvalue()).decode()
    for data in (wrong, "no base64!", None):
        server.change = lambda _, data=data: {"prompt_token_id_logprobs": data}  # type: ignore[misc]
        [answer] = engine.score([query(server, head_ids=heads)])
        assert isinstance(answer, Corrupt), data


def test_a_server_that_refuses_what_the_engine_needs(server: VllmLike, tiny_model: Path) -> None:
    server.change = lambda _: {"choices": [{"text": "no log-probs"}]}
    with pytest.raises(InvalidInput, match="returns no log-probs of prompts"):
        engine_of(server, tiny_model)
    server.change = lambda answer: answer
    server.vocab = 3
    with pytest.raises(InvalidInput, match="which the tokenizer has") as caught:
        engine_of(server, tiny_model)
    assert caught.value.field == "--tokenizer"


def test_a_door_that_is_shut(server: VllmLike, tiny_model: Path) -> None:
    """It is not a wrong key."""
    server.shut = True
    engine = engine_of(server, tiny_model)
    assert (engine.info.limits.max_chosen_ids, engine.info.limits.max_top_k) == (0, 16)
    engine.close()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/", "", "http://", "http://h:99999", "http://h:port"]
)
def test_what_is_no_address(url: str, tiny_model: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is not (an|a valid) address"):
        EndpointEngine(url, tokenizer=str(tiny_model), served_model="", max_top_k=4, step_tokens=64)


def test_no_tokenizer(server: VllmLike, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine_of(server, tmp_path / "nowhere")
    assert caught.value.field == "--tokenizer"


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://any:SECRET@127.0.0.1:9", "", "has a user or a password"),
        ("http://127.0.0.1:9", "SECRET\nvalue", "has characters that are not allowed in a key"),
        ("http://127.0.0.1:9", "SECRET\u00e9", "has characters that are not allowed in a key"),
    ],
)
def test_a_secret_is_in_no_message(
    url: str, key: str, message: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", key)
    with pytest.raises(InvalidInput, match=message) as caught:
        EndpointEngine(url, tokenizer=str(tiny_model), served_model="", max_top_k=4, step_tokens=64)
    assert "SECRET" not in f"{caught.value}{caught.value.hint}"


def test_space_around_a_key_is_left_out(
    server: VllmLike, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a secret that was read from a file has it."""
    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", "key\n")
    engine_of(server, tiny_model).close()
