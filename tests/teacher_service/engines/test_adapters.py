"""Adapters that requests name: rows of the merged model in float64, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput, WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.endpoint import EndpointEngine
from teacher_service.engines.hf import HfEngine
from teacher_service.models.adapters import Adapter, read_adapters
from tests.teacher_service.adapters import save_adapter, save_merged
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.http.asking import Site
from tests.teacher_service.tiny_model import VOCAB_SIZE
from tests.vllm.float64 import Exact

NAMES = ("", "math", "keys")  # a name that a ModuleDict does not take


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two ranks, for other layers, and one scaled by the square root of its rank."""
    path = tmp_path_factory.mktemp("adapters")
    pattern = {"rank_pattern": {"layers.1.mlp.up_proj": 9}, "target_modules": ["v_proj", "up_proj"]}
    return {
        "math": save_adapter(tiny_model, path / "math", seed=1),
        "keys": save_adapter(tiny_model, path / "keys", seed=2, r=3, use_rslora=True, **pattern),
    }


def options(adapters: dict[str, Path]) -> list[str]:
    return [f"{name}={path}" for name, path in adapters.items()]


def queries() -> list[ScoreQuery]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (2, 40, 90)]
    return [ScoreQuery(token_ids, 1, top_k=6, f32=True) for token_ids in ids]


@pytest.fixture(scope="module")
def exact(
    tiny_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Exact]:
    path = tmp_path_factory.mktemp("merged")
    merged = {
        name: save_merged(tiny_model, adapter_path, path / name)
        for name, adapter_path in adapters.items()
    }
    return {name: Exact(adapter_path) for name, adapter_path in {"": tiny_model, **merged}.items()}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_are_those_of_the_merged_model(
    tiny_model: Path, adapters: dict[str, Path], exact: dict[str, Exact], batch_invariant: bool
) -> None:
    """In one batch with rows of the other adapter, and of none."""
    engine = HfEngine(
        str(tiny_model),
        device="cpu",
        batch_invariant=batch_invariant,
        adapters=read_adapters(options(adapters)),
    )
    adapter_queries = [replace(query, adapter=name) for query in queries() for name in NAMES]
    for query, rows in zip(adapter_queries, engine.score(adapter_queries), strict=True):
        assert isinstance(rows, RowBlock)
        assert exact[query.adapter].differences(query, rows).largest < 1e-4
        exact[query.adapter].assert_likeliest(query, rows, within=1e-4)
        other_models = [other_model for name, other_model in exact.items() if name != query.adapter]
        assert (
            min(other_model.differences(query, rows).largest for other_model in other_models) > 0.1
        )


def test_the_fingerprints(tiny_model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """That without an adapter is the model's; those with one change with weights and scale only."""
    plain = HfEngine(str(tiny_model), device="cpu").info
    read = read_adapters(options(adapters))
    info = HfEngine(str(tiny_model), device="cpu", adapters=read).info
    assert info.fingerprint == plain.fingerprint == info.fingerprint_for("")
    fingerprints = {info.fingerprint_for(name) for name in NAMES}
    assert len(fingerprints) == 3
    copy = shutil.copytree(adapters["math"], tmp_path / "copy")
    edit(copy, base_model_name_or_path="elsewhere", inference_mode=False)
    [same] = read_adapters([f"renamed={copy}"])
    assert same.digest == read[0].digest
    edit(copy, lora_alpha=9)
    [copied_adapter] = read_adapters([f"math={copy}"])
    assert copied_adapter.digest != read[0].digest


def edit(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_weights_are_not_pushed_beneath_adapters(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    engine = HfEngine(str(tiny_model), device="cpu", adapters=read_adapters(options(adapters)))
    with pytest.raises(WrongState, match="with adapters cannot be replaced"):
        engine.parameters()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "has use_dora = True"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa'"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"peft_type": "IA3", "r": None}, "is an adapter of type IA3, not LORA"),
        ({"r": None}, "adapter_config.json is malformed"),
    ],
)
def test_another_kind_is_refused(
    adapters: dict[str, Path], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    edit(shutil.copytree(adapters["math"], tmp_path / "copy"), **changes)
    with pytest.raises(InvalidInput, match=message) as caught:
        read_adapters([f"math={tmp_path / 'copy'}"])
    assert caught.value.field == "--adapter"
    assert caught.value.hint


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "x" * 9])
def test_a_damaged_file_is_refused(
    adapters: dict[str, Path], file: str, content: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(adapters["math"], tmp_path / "copy")
    (copy / file).write_text(content)
    with pytest.raises(InvalidInput, match=f"{file} (cannot be|is) ") as caught:
        read_adapters([f"math={copy}"])
    assert caught.value.field == "--adapter"


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_head_or_embeddings_is_refused(
    target: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = save_adapter(tiny_model, tmp_path / "adapter", seed=1, target_modules=["q_proj", target])
    with pytest.raises(InvalidInput, match="not a product for a layer between embeddings and head"):
        read_adapters([f"math={path}"])


def test_options_that_are_not_name_and_directory(adapters: dict[str, Path], tmp_path: Path) -> None:
    for option in ("math", "=x", "a.b=x"):
        with pytest.raises(InvalidInput, match="is not NAME=DIR"):
            read_adapters([option])
    with pytest.raises(InvalidInput, match=r"has no adapter_config.json"):
        read_adapters([f"math={tmp_path}"])
    with pytest.raises(InvalidInput, match="two adapters are named 'math'"):
        read_adapters([f"math={adapters['math']}", f"math={adapters['keys']}"])


def test_an_adapter_of_another_model(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def refused(adapter: Adapter) -> None:
        with pytest.raises(InvalidInput, match="does not fit this model") as caught:
            HfEngine(str(tiny_model), device="cpu", adapters=[adapter])
        assert caught.value.field == "--adapter"

    copy = shutil.copytree(adapters["math"], tmp_path / "copy")
    edit(copy, r=5)  # other shapes than the files'
    refused(read_adapters([f"math={copy}"])[0])
    edit(copy, r=4, target_modules=["q_proj", "o_proj"])  # the files have one more
    refused(read_adapters([f"math={copy}"])[0])


def test_a_client_names_an_adapter(
    tiny_model: Path,
    adapters: dict[str, Path],
    exact: dict[str, Exact],
    start_teacher: StartTeacher,
    tmp_path: Path,
) -> None:
    """Its identity is that of the adapter, so that no other rows are found in a cache."""
    chosen = [part for option in options(adapters) for part in ("--adapter", option)]
    teacher = start_teacher(
        *("--model", str(tiny_model), "--device", "cpu", "--dtype", "float32", *chosen),
        *("--cache-dir", str(tmp_path / "cache")),
    )
    rows_by_name = {}
    for name in NAMES * 2:  # the second time from the cache
        with TeacherClient(teacher.address, adapter=name) as client:
            info = client.info()
            rows_by_name[name] = info.fingerprint
            for query, rows in zip(queries(), client.score(queries()), strict=True):
                assert exact[name].differences(query, rows).largest < 1e-4
    assert len(set(rows_by_name.values())) == 3
    assert dict(info.adapters) == {name: rows_by_name[name] for name in NAMES if name}
    with TeacherClient(teacher.address) as client:
        assert client.load().cache_tiers["memory"][0] == 9
        answer = client.submit(replace(queries()[0], adapter="unknown"))
        with pytest.raises(
            InvalidInput, match="has no adapter 'unknown'; its adapters are keys, math"
        ):
            answer.result()
    with TeacherClient(teacher.address, adapter="unknown") as client:
        with pytest.raises(
            WrongState, match="has no adapter 'unknown'; its adapters are keys, math"
        ) as no:
            client.info()
        assert no.value.field == "teacher.adapter"


def test_over_http_an_adapter_is_a_model(
    tiny_model: Path, adapters: dict[str, Path], start_teacher: StartTeacher
) -> None:
    """Another teacher takes the rows of one of them from there."""
    chosen = [part for option in options(adapters) for part in ("--adapter", option)]
    own = ("--model", str(tiny_model), "--device", "cpu", "--dtype", "float32")
    site = Site(start_teacher(*own, *chosen, "--http-port", "0"))
    models = site.ask("/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == [str(tiny_model), "math", "keys"]
    assert [entry["parent"] for entry in models] == [None, str(tiny_model), str(tiny_model)]
    engine = EndpointEngine(
        site.url, tokenizer=str(tiny_model), served_model="keys", max_top_k=32, step_tokens=4096
    )
    answers = engine.score(queries())
    engine.close()
    model = HfEngine(str(tiny_model), device="cpu", adapters=read_adapters(options(adapters)))
    expected = model.score([replace(query, adapter="keys") for query in queries()])
    for rows, expected_rows in zip(answers, expected, strict=True):
        assert isinstance(rows, RowBlock)
        assert isinstance(expected_rows, RowBlock)
        np.testing.assert_array_equal(rows.head_ids, expected_rows.head_ids)
        np.testing.assert_allclose(rows.head_logprobs, expected_rows.head_logprobs, atol=1e-5)
        np.testing.assert_allclose(rows.token_logprobs, expected_rows.token_logprobs, atol=1e-5)
    answer = site.ask("/v1/completions", {"model": "x", "prompt": [1, 2], "prompt_logprobs": 1})
    assert answer.status == 404
