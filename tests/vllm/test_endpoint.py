"""The endpoint engine in front of a real vLLM server, beside the same model in transformers.

vLLM scores chosen ids with its second model runner only, which needs Triton and so a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput, Unauthenticated
from protos.rows.codec import RowBlock
from tests.teacher_service.processes import TeacherProcess
from tests.vllm.model import MAX_LENGTH, VOCAB_SIZE, save_model
from tests.vllm.test_training import finished
from tests.vllm.vllm_server import KEY, MAX_LOGPROBS, NAME, vllm_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_server(model, log, "--enable-scale-out") as server_address:
        yield server_address


@pytest.fixture
def engine(address: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from teacher_service.engines.endpoint import EndpointEngine

    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", KEY)
    endpoint_engine = EndpointEngine(
        address, tokenizer=str(model), served_model="", max_top_k=1024, step_tokens=4096
    )
    yield endpoint_engine
    endpoint_engine.close()


def likeliest() -> list[ScoreQuery]:
    rng = np.random.default_rng(0)
    score_queries = []
    for number, length in enumerate((2, 17, 64, 150)):
        tokens = rng.integers(0, VOCAB_SIZE, length).astype(np.int32)
        start = 1 + number * length // 8
        score_queries += [ScoreQuery(tokens, start, top_k=k) for k in (1, 16, MAX_LOGPROBS)]
    return score_queries


def chosen() -> list[ScoreQuery]:
    """With and without draws."""
    rng = np.random.default_rng(0)
    score_queries = []
    for number, length in enumerate((2, 17, 64, 150)):
        tokens = rng.integers(0, VOCAB_SIZE, length).astype(np.int32)
        start = 1 + number * length // 8
        rows = length - start
        ids = np.argsort(rng.random((rows, VOCAB_SIZE)))[:, :30].astype(np.int32)
        score_queries += [
            ScoreQuery(tokens, start, head_ids=ids[:, :8], draw_ids=ids[:, 8:]),
            ScoreQuery(tokens, start, head_ids=ids),
        ]
    return score_queries


def test_what_the_server_can_do_is_found_out(engine: Any) -> None:
    info = engine.info
    assert (info.model, info.name) == (NAME, "endpoint")
    assert info.max_length == MAX_LENGTH - 1
    assert info.vocab_size == VOCAB_SIZE
    assert info.limits.max_top_k == MAX_LOGPROBS
    assert not info.limits.any_temperature
    assert not info.limits.tail_samples


def test_the_rows_of_the_same_model_in_transformers(engine: Any, model: Path) -> None:
    """In float32. The head of a top-k row never has the sampled token as its (k + 1)-th id."""
    from teacher_service.serving.self_test import run_self_test

    assert_same(engine, model, likeliest())
    assert run_self_test(engine) < 1e-3


def test_the_rows_of_a_server_that_only_echoes(
    address: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lists k or k + 1 ids of a row, and no ranks; one id fewer than it lists is a head."""
    from teacher_service.engines.endpoint import EndpointEngine
    from teacher_service.engines.endpoint_wire import ECHO
    from teacher_service.serving.self_test import run_self_test

    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", KEY)
    engine = EndpointEngine(
        address,
        tokenizer=str(model),
        served_model="",
        max_top_k=1024,
        step_tokens=4096,
        wires=[ECHO],
    )
    assert engine.info.limits.max_top_k == MAX_LOGPROBS - 1
    score_queries = [replace(query, top_k=min(query.k, MAX_LOGPROBS - 1)) for query in likeliest()]
    assert_same(engine, model, score_queries)
    assert run_self_test(engine) < 1e-3
    engine.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's second runner needs a GPU")
def test_chosen_ids(engine: Any, model: Path) -> None:
    assert engine.info.limits.max_chosen_ids == MAX_LOGPROBS - 1
    assert_same(engine, model, chosen())


def assert_same(engine: Any, model: Path, score_queries: list[ScoreQuery]) -> None:
    from teacher_service.engines.hf import HfEngine

    before = engine.requested_tokens
    rows, expected = (
        engine.score(score_queries),
        HfEngine(str(model), dtype="float32").score(score_queries),
    )
    for own_rows, expected_rows in zip(rows, expected, strict=True):
        assert isinstance(own_rows, RowBlock)
        assert isinstance(expected_rows, RowBlock)
        np.testing.assert_array_equal(own_rows.head_ids, expected_rows.head_ids)
        for name in ("head_logprobs", "token_logprobs", "draw_logprobs"):
            if getattr(expected_rows, name) is not None:
                np.testing.assert_allclose(
                    getattr(own_rows, name), getattr(expected_rows, name), rtol=0, atol=1e-3
                )
        tail, true_tail = np.exp(own_rows.tail_logmass), np.exp(expected_rows.tail_logmass)
        np.testing.assert_allclose(tail, true_tail, rtol=0, atol=1e-4)
    assert engine.requested_tokens - before == sum(len(query.token_ids) for query in score_queries)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"tail_samples": 2}, "tail_samples"),
        ({"top_k": MAX_LOGPROBS + 1}, "token_ids"),
    ],
)
def test_what_the_server_cannot_compute_is_refused(
    engine: Any, changes: dict[str, Any], field: str
) -> None:
    fields: dict[str, Any] = {"token_ids": np.array([1, 2], np.int32), "start": 1, "top_k": 1}
    [answer] = engine.score([ScoreQuery(**{**fields, **changes})])
    assert isinstance(answer, InvalidInput)
    assert answer.field == field


def test_a_wrong_name_or_key(address: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from teacher_service.engines.endpoint import EndpointEngine

    options: dict[str, Any] = {"max_top_k": 8, "step_tokens": 64, "tokenizer": str(model)}
    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", "another key")
    with pytest.raises(Unauthenticated, match="DISTILL_ENDPOINT_KEY"):
        EndpointEngine(address, served_model="", **options)
    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", KEY)
    with pytest.raises(InvalidInput, match=f"serves {NAME}, not 'mine'") as caught:
        EndpointEngine(address, served_model="mine", **options)
    assert caught.value.field == "--served-model"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the server scores chosen ids")
def test_a_server_that_scores_only_its_own_likeliest_ids(
    address: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's ids are refused, in one sentence."""
    from teacher_service.engines.endpoint import EndpointEngine

    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", KEY)
    engine = EndpointEngine(
        f"{address}/v1/", tokenizer=str(model), served_model=NAME, max_top_k=8, step_tokens=64
    )
    assert (engine.info.limits.max_top_k, engine.info.limits.max_chosen_ids) == (8, 0)
    tokens, head = np.array([1, 2], np.int32), np.array([[3]], np.int32)
    [answer] = engine.score([ScoreQuery(tokens, 1, head_ids=head)])
    assert isinstance(answer, InvalidInput)
    assert answer.field == "head_ids"
    engine.close()


def test_a_job_learns_as_from_a_teacher_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the teacher's likeliest ids, both KLs: the curves of the same model in transformers."""
    from student_trainer.tools.pretrain import make_model
    from tests.student_trainer import tiny

    monkeypatch.setenv("DISTILL_ENDPOINT_KEY", KEY)
    material = tiny.save_material(tmp_path / "material")
    words = tiny.tokenizer()
    torch.manual_seed(5)
    tiny.save(make_model(len(words), words, 2, 64), words, material.teacher)  # heads of 32
    forward = {"method__divergence": "forward_kl", "method__tail": "bucket"}
    objectives = {"forward": forward, "reverse": {"method__head": "teacher"}}
    steps: dict[str, Any] = {"max_steps": 6, "eval__every": 3}
    own = ("--model", str(material.teacher), "--dtype", "float32")
    with vllm_server(material.teacher, tmp_path / "vllm.log") as address:
        endpoint_options = (
            "--engine",
            "endpoint",
            "--model",
            address,
            "--tokenizer",
            str(material.teacher),
        )
        curves: list[list[dict[str, float]]] = []
        for name, options in (("own", own), ("theirs", endpoint_options)):
            teacher = TeacherProcess([*options, "--no-cache"], log=tmp_path / f"{name}.log")
            try:
                curves.append([])
                for objective, changes in objectives.items():
                    job = tiny.job(material, teacher.address, **steps, **changes)
                    curves[-1] += finished(tmp_path / f"{name}-{objective}", job)
            finally:
                teacher.close()
    for teacher_curve, endpoint_curve in zip(*curves, strict=True):
        assert teacher_curve["step"] == endpoint_curve["step"]
        for metric in {"loss", "kl/teacher", "eval/kl"} & teacher_curve.keys():
            assert endpoint_curve[metric] == pytest.approx(teacher_curve[metric], abs=2e-3), metric
