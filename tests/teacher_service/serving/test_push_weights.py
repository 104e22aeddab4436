"""Pushed weights: all or nothing, between two batches, and every row says which ones made it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from google.protobuf.message import DecodeError

from clients.teacher.push_weights import weights_parts
from protos import teacher_pb2
from protos.errors import Corrupt, DistillError, InvalidInput, WrongState
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.engines.hf import HfEngine
from tests.teacher_service.serving.pushing import NAME, Arrays, arrays, parameters, push, rows
from tests.teacher_service.tiny_model import save_tiny_model


def test_replaced_weights_are_those_of_the_other_model(tiny_model: Path, other_model: Path) -> None:
    engine, other_engine = HfEngine(str(tiny_model)), HfEngine(str(other_model))
    before, first = engine.info, rows(engine)
    after = push(engine, weights_parts(arrays(other_engine), tau=None, base_version=0))
    assert (before.version, after.version) == (0, 1)
    assert after.fingerprint not in (before.fingerprint, other_engine.info.fingerprint)
    assert rows(engine).head_logprobs.tobytes() == rows(other_engine).head_logprobs.tobytes()
    assert rows(engine).head_logprobs.tobytes() != first.head_logprobs.tobytes()


def test_a_tied_head_follows(tmp_path: Path, other_model: Path) -> None:
    engine = HfEngine(str(save_tiny_model(tmp_path / "a", tied=True)))
    other_engine = HfEngine(str(save_tiny_model(tmp_path / "b", seed=3, tied=True)))
    assert "lm_head.weight" not in parameters(engine)
    push(engine, weights_parts(arrays(other_engine), tau=None, base_version=0))
    assert rows(engine).head_logprobs.tobytes() == rows(other_engine).head_logprobs.tobytes()


def test_the_fingerprint_is_of_what_was_pushed(tiny_model: Path, other_model: Path) -> None:
    """A teacher that restarts counts from 0 again: its version alone would find old rows."""
    pushed = arrays(HfEngine(str(other_model)))
    changed = {name: array.copy() for name, array in pushed.items()}
    name = next(iter(changed))
    changed[name].flat[0] = np.nextafter(changed[name].flat[0], np.float32(9))

    def after(*pushes: tuple[Arrays, float | None]) -> str:
        engine = HfEngine(str(tiny_model))
        for version, (tensors, tau) in enumerate(pushes):
            push(engine, weights_parts(tensors, tau=tau, base_version=version))
        return engine.info.fingerprint

    lives = [
        after((pushed, None)),
        after((changed, None)),
        after((pushed, 0.9)),
        after((pushed, 0.8)),
        after((pushed, None), (pushed, None)),
    ]
    assert len({*lives}) == len(lives)
    assert after((pushed, None)) == lives[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_average_is_taken_in_float32(tiny_model: Path, other_model: Path, dtype: str) -> None:
    """Twenty steps against float64; in bfloat16, whose steps would be lost, half a unit of it."""
    engine = HfEngine(str(tiny_model), dtype=dtype)
    theta, tau = arrays(HfEngine(str(other_model))), 0.999
    phi = {name: array.astype(np.float64) for name, array in arrays(engine).items()}
    for version in range(20):
        push(engine, weights_parts(theta, tau=tau, base_version=version))
        phi = {name: tau * phi[name] + (1 - tau) * theta[name] for name in phi}
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-6
    for name, served in arrays(engine).items():
        np.testing.assert_allclose(served, phi[name], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_pushed_as_bits(tiny_model: Path, other_model: Path, dtype: str) -> None:
    engine = HfEngine(str(tiny_model), dtype=dtype)
    other_engine = HfEngine(str(other_model), dtype=dtype)
    bits = np.uint16 if dtype == "bfloat16" else np.float16
    halves = {n: p.detach().view(torch.uint16).numpy() for n, p in parameters(other_engine).items()}
    halves = {name: array.view(bits) for name, array in halves.items()}
    push(engine, weights_parts(halves, tau=None, base_version=0))
    assert rows(engine).head_logprobs.tobytes() == rows(other_engine).head_logprobs.tobytes()


Edit = Callable[[list[teacher_pb2.WeightsPart]], object]


def edit_chunk(number: int, **fields: Any) -> Edit:
    def edit(parts: list[teacher_pb2.WeightsPart]) -> None:
        chunk = parts[number].chunk
        for name, value in fields.items():
            setattr(chunk, name, value)
        if "xxh3" not in fields:
            chunk.xxh3 = xxhash.xxh3_64_intdigest(chunk.data)

    return edit


def with_number(value: float) -> Edit:
    def edit(parts: list[teacher_pb2.WeightsPart]) -> None:
        data = np.frombuffer(parts[3].chunk.data, np.float32).copy()
        data[-1] = value
        edit_chunk(3, data=data.tobytes())(parts)

    return edit


def header(field: str, value: Any) -> Edit:
    return lambda parts: setattr(parts[0].header, field, value)


def third(field: str, value: Any) -> Edit:
    def edit(parts: list[teacher_pb2.WeightsPart]) -> None:
        spec = parts[0].header.tensors[2]
        if field == "shape":
            spec.shape[:] = value
        else:
            setattr(spec, field, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "kind", "field"),
    [
        (lambda parts: parts.clear(), InvalidInput, "tensors"),
        (lambda parts: parts.pop(0), InvalidInput, "mode"),
        (lambda parts: parts.pop(), InvalidInput, "tensors"),
        (lambda parts: parts.pop(5), InvalidInput, None),
        (lambda parts: parts.insert(4, parts[4]), InvalidInput, None),
        (header("mode", 0), InvalidInput, "mode"),
        (header("mode", 7), InvalidInput, "mode"),
        (header("mode", 2), InvalidInput, "tau"),
        (header("base_version", 1), WrongState, "base_version"),
        (header("total_bytes", 1), InvalidInput, "total_bytes"),
        (lambda parts: parts[0].header.tensors.pop(2), InvalidInput, NAME),
        (
            lambda parts: parts[0].header.tensors.append(parts[0].header.tensors[2]),
            InvalidInput,
            NAME,
        ),
        (third("name", "model.x"), InvalidInput, "model.x"),
        (third("shape", [16, 33]), InvalidInput, NAME),
        (third("shape", [2**63, 2**63]), InvalidInput, NAME),
        (third("shape", []), InvalidInput, NAME),
        (third("dtype", "float64"), InvalidInput, NAME),
        (third("dtype", "bfloat16"), InvalidInput, NAME),
        (edit_chunk(3, tensor=5), InvalidInput, NAME),
        (edit_chunk(3, offset=4), InvalidInput, NAME),
        (edit_chunk(3, data=b""), InvalidInput, NAME),
        (edit_chunk(3, data=b"123"), InvalidInput, NAME),
        (edit_chunk(3, data=bytes(8192)), InvalidInput, NAME),
        (edit_chunk(3, xxh3=1), Corrupt, NAME),
        (with_number(float("nan")), InvalidInput, NAME),
        (with_number(float("inf")), InvalidInput, NAME),
        (with_number(float("-inf")), InvalidInput, NAME),
    ],
)
def test_a_wrong_push_names_the_tensor_and_changes_nothing(
    shared_engine: HfEngine, edit: Edit, kind: type[DistillError], field: str | None
) -> None:
    before, info = arrays(shared_engine), shared_engine.info
    assert list(before)[2] == NAME
    parts = list(weights_parts(before, tau=None, base_version=0))
    edit(parts)
    with pytest.raises(DistillError) as caught:
        push(shared_engine, parts)
    assert type(caught.value) is kind
    assert field in (None, caught.value.field)
    assert shared_engine.info is info
    after = arrays(shared_engine)
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> HfEngine:
    return HfEngine(str(save_tiny_model(tmp_path_factory.mktemp("shared"))))


def test_changed_bytes_of_a_push_are_refused_or_without_effect(shared_engine: HfEngine) -> None:
    """T16: one part of a push, changed anywhere; what is applied is what was meant."""
    rng = np.random.default_rng(0)
    before = arrays(shared_engine)
    outcomes: dict[str, int] = {}
    for _ in range(300):
        parts = list(weights_parts(before, tau=None, base_version=shared_engine.info.version))
        number = int(rng.integers(len(parts))) if rng.random() < 0.5 else 0
        data = bytearray(parts[number].SerializeToString())
        at = int(rng.integers(len(data)))
        if rng.random() < 0.7:
            data[at] ^= 1 << int(rng.integers(8))
        else:
            del data[at : at + int(rng.integers(1, 9))]
        try:
            parts[number] = teacher_pb2.WeightsPart.FromString(bytes(data))
            push(shared_engine, parts)
            outcome = "applied"
        except (DistillError, DecodeError) as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    after = arrays(shared_engine)
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)
    assert outcomes.keys() <= {"applied", "InvalidInput", "WrongState", "Corrupt", "DecodeError"}
    assert outcomes["InvalidInput"] > 50
    assert outcomes["Corrupt"] > 20


def test_a_number_too_large_for_the_serving_type(tiny_model: Path) -> None:
    engine = HfEngine(str(tiny_model), dtype="float16")
    tensors = arrays(engine)
    tensors[NAME].flat[0] = 65505.0
    with pytest.raises(InvalidInput, match="finite") as caught:
        push(engine, weights_parts(tensors, tau=None, base_version=0))
    assert caught.value.field == NAME


def test_only_floats_are_sent() -> None:
    with pytest.raises(InvalidInput, match="float64") as caught:
        list(weights_parts({"a": np.zeros(3)}, tau=None, base_version=0))
    assert caught.value.field == "a"


def test_the_fake_engine_has_no_weights() -> None:
    with pytest.raises(WrongState, match="fake cannot replace its weights"):
        push(FakeEngine(FakeSettings()), [])
