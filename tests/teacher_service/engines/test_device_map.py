"""A model that is divided over memory and disk, beside the same one in memory: the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput, WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.hf import HfEngine
from teacher_service.models.device_map import Memory
from teacher_service.program import ScoringEngineSettings, VllmEngineSettings, make_engine
from teacher_service.serving.self_test import run_self_test
from tests.teacher_service.tiny_model import VOCAB_SIZE, save_tiny_model

# Bytes: of the model, whose two layers have 9,312 parameters each, and of less than that.
FITS, HALF, LEAST = 1 << 30, 60_000, 1


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def queries() -> list[ScoreQuery]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (40, 7, 23)]
    heads = np.argsort(rng.random((22, VOCAB_SIZE)))[:, :6].astype(np.int32)
    return [
        ScoreQuery(tokens[0], 5, top_k=9, tail_samples=2),
        ScoreQuery(tokens[1], 1, top_k=9, temperature=0.7),
        ScoreQuery(tokens[2], 1, head_ids=heads),
    ]


@pytest.mark.parametrize(("bytes_of_cpu", "on_disk"), [(FITS, False), (HALF, True), (LEAST, True)])
def test_the_rows_are_those_of_a_model_in_memory(
    model: Path, bytes_of_cpu: int, on_disk: bool
) -> None:
    memory: Memory = {"cpu": bytes_of_cpu}
    divided, plain = HfEngine(str(model), memory=memory), HfEngine(str(model), device="cpu")
    parameters = list(divided._model.parameters())
    assert any(parameter.is_meta for parameter in parameters) == on_disk
    assert all(parameter.is_meta for parameter in parameters) == (bytes_of_cpu == LEAST)
    assert not divided._head.weight.is_meta
    for rows, expected in zip(divided.score(queries()), plain.score(queries()), strict=True):
        assert isinstance(rows, RowBlock)
        assert isinstance(expected, RowBlock)
        for name in ("head_ids", "head_logprobs", "tail_logmass", "token_logprobs"):
            np.testing.assert_array_equal(getattr(rows, name), getattr(expected, name))
        np.testing.assert_array_equal(rows.tail_sample_ids, expected.tail_sample_ids)
    assert divided.info == plain.info
    assert run_self_test(divided) == run_self_test(plain)


def test_its_weights_cannot_be_replaced(model: Path) -> None:
    with pytest.raises(WrongState, match="divided over devices"):
        HfEngine(str(model), memory={"cpu": HALF}).parameters()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_map": "balanced"}, "unknown device map 'balanced'"),
        ({"device": "cpu"}, "--device-map uses all devices"),
        ({"adapters": ["a=DIR"]}, "has no adapters"),
        ({"name": "vllm"}, "the vllm engine has no such option"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: Path, changes: dict[str, str], message: str
) -> None:
    settings = {
        **{"name": "hf", "model": str(model), "dtype": "float32", "device": "auto"},
        **{"batch_invariant": False, "max_batch_tokens": 64, "max_top_k": 8},
        **{"vllm": VllmEngineSettings(1, 0.9), "device_map": "auto"},
    }
    with pytest.raises(InvalidInput, match=message) as caught:
        make_engine(ScoringEngineSettings(**{**settings, **changes}))  # type: ignore[arg-type]
    assert caught.value.field == "--device-map"


def test_the_memory_of_this_machine(model: Path) -> None:
    """What the option does: a tiny model fits."""
    settings = ScoringEngineSettings(
        *("hf", str(model), "float32", "auto"),
        batch_invariant=False,
        max_batch_tokens=64,
        max_top_k=8,
        vllm=VllmEngineSettings(1, 0.9),
        device_map="auto",
    )
    engine = make_engine(settings)
    assert isinstance(engine, HfEngine)
    assert not any(parameter.is_meta for parameter in engine._model.parameters())
    assert engine.info.dtype == str(torch.float32).removeprefix("torch.")
