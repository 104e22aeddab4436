"""The adapter for verl with a real teacher, and with verl's own manager where verl is there."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploy.adapters.verl import DistillTeacher
from protos.errors import InvalidInput
from tests.teacher_service.http.asking import FAKE, distributions, tokens
from tests.teacher_service.processes import TeacherProcess


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("verl") / "log"
    teacher = TeacherProcess([*FAKE, "--no-cache"], log=log)
    yield teacher.address
    teacher.close()


def sampling(k: int, temperature: float = 1.0) -> dict[str, Any]:
    """As verl's teacher manager makes them."""
    return {"max_tokens": 1, "temperature": temperature, "prompt_logprobs": k, "detokenize": False}


def expected(ids: list[int], k: int) -> tuple[Any, Any]:
    """What verl extracts of vLLM's answer: by rank, without the token beyond the k; a last row."""
    logprobs = distributions(ids)
    heads = np.argsort(-logprobs, axis=1, kind="stable")[:, :k] if k else np.array(ids[1:])[:, None]
    values = np.take_along_axis(logprobs, heads, axis=1)
    return np.pad(heads, ((0, 1), (0, 0))), np.pad(values, ((0, 1), (0, 0)))


@pytest.mark.parametrize("k", [0, 1, 6])
def test_the_rows_that_verl_reads(address: str, k: int) -> None:
    ids = tokens(40)
    # As it comes to the worker that uses it.
    teacher: DistillTeacher = pickle.loads(pickle.dumps(DistillTeacher(address)))
    found = asyncio.run(
        teacher.generate("1", prompt_ids=ids, sampling_params=sampling(k), image_data=None)
    ).extra_fields
    heads, values = expected(ids, k)
    np.testing.assert_array_equal(found["prompt_ids"], heads)
    np.testing.assert_allclose(found["prompt_logprobs"], values, atol=2e-6)


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"image_data": ["x"]}, "image_data"), ({"sampling_params": sampling(1, 0.7)}, "temperature")],
)
def test_what_rows_are_not(address: str, changed: dict[str, Any], field: str) -> None:
    fields = {"prompt_ids": [1, 2], "sampling_params": sampling(1), **changed}
    with pytest.raises(InvalidInput) as caught:
        asyncio.run(DistillTeacher(address).generate("1", **fields))
    assert caught.value.field == field


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
@pytest.mark.parametrize("k", [0, 6])
def test_the_manager_of_verl(address: str, k: int) -> None:
    """Of an agent loop's worker, where the sequences come from; unchanged."""
    from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager

    ids = tokens(40)
    manager: Any = object.__new__(AsyncTeacherLLMServerManager)
    settings = SimpleNamespace(use_topk=k > 0)
    manager.distillation_loss_config = SimpleNamespace(topk=k, loss_settings=settings)
    inference = SimpleNamespace(temperature=1.0, max_model_len=None)
    manager.teacher_model_configs = {"default": SimpleNamespace(inference=inference)}
    manager.teacher_client = {"default": DistillTeacher(address)}
    found = asyncio.run(manager.compute_teacher_logprobs_single(ids))
    heads, values = expected(ids, k)
    np.testing.assert_array_equal(found[0], heads)
    np.testing.assert_allclose(found[1], values, atol=2e-6)
