"""Further options of vLLM: what is refused, and a teacher that divides its queries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput
from teacher_service.engines.vllm import VllmEngine
from teacher_service.engines.vllm_process import read_options, select_changing_options
from tests.vllm.model import VOCAB_SIZE, save_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("option_texts", "message"),
    [
        (["data_parallel_size"], "is not NAME=VALUE"),
        (["data_paralel_size=2"], "vLLM has no option 'data_paralel_size'"),
        (["worker_cls=x"], "the teacher sets worker_cls itself"),
        (["seed=1", "seed=2"], "seed is given twice"),
    ],
)
def test_refused(model: Path, option_texts: list[str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        VllmEngine(str(model), options=option_texts)
    assert caught.value.field == "--engine-option"


def test_values_and_what_the_fingerprint_has_of_them() -> None:
    option_texts = ["data_parallel_size=2", "enable_expert_parallel=true", "quantization=fp8"]
    options = read_options(option_texts, ())
    assert options == {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "quantization": "fp8",
    }
    assert select_changing_options(options) == {"options": {"quantization": "fp8"}}
    assert select_changing_options({}) == {}


def test_two_processes_that_divide_the_queries(model: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = (3, 20, 100, 300, 40, 41)
    ids = [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]
    queries = [ScoreQuery(token_ids, 1, top_k=8) for token_ids in ids]
    alone = VllmEngine(str(model), max_batch_tokens=256)
    single_answers = alone.score(queries)
    alone.close()
    pair = VllmEngine(str(model), max_batch_tokens=256, options=["data_parallel_size=2"])
    pair_answers = pair.score(queries)
    assert pair.step_tokens == 512
    pair.close()
    assert pair.info.fingerprint == alone.info.fingerprint
    for a, b in zip(single_answers, pair_answers, strict=True):
        assert not isinstance(a, Exception)
        assert not isinstance(b, Exception)
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-5)
        np.testing.assert_array_equal(a.head_ids, b.head_ids)
