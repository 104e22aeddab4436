"""The verl adapter with a real teacher, and with verl's own manager if verl is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.adapters.verl import DistillTeacher, DistillTeachers
from protos.errors import InvalidInput
from tests.teacher_service.http.asking import FAKE, distributions, tokens
from tests.teacher_service.processes import TeacherProcess


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("verl") / "log"
    teacher = TeacherProcess([*FAKE, "--no-cache"], log=log)
    yield teacher.address
    teacher.close()


def make_sampling_params(k: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return the sampling parameters that verl's teacher manager sends."""
    return {"max_tokens": 1, "temperature": temperature, "prompt_logprobs": k, "detokenize": False}


def expected(ids: list[int], k: int) -> tuple[Any, Any]:
    """Return what verl extracts from vLLM's answer: ids and logprobs by rank; the last row is 0."""
    logprobs = distributions(ids)
    heads = np.argsort(-logprobs, axis=1, kind="stable")[:, :k] if k else np.array(ids[1:])[:, None]
    values = np.take_along_axis(logprobs, heads, axis=1)
    return np.pad(heads, ((0, 1), (0, 0))), np.pad(values, ((0, 1), (0, 0)))


@pytest.mark.parametrize("k", [0, 1, 6])
def test_the_rows_that_verl_reads(address: str, k: int) -> None:
    ids = tokens(40)
    # verl pickles the adapter to send it to a worker.
    teacher: DistillTeacher = pickle.loads(pickle.dumps(DistillTeacher(address)))
    extra_fields = asyncio.run(
        teacher.generate(
            "1", prompt_ids=ids, sampling_params=make_sampling_params(k), image_data=None
        )
    ).extra_fields
    heads, values = expected(ids, k)
    np.testing.assert_array_equal(extra_fields["prompt_ids"], heads)
    np.testing.assert_allclose(extra_fields["prompt_logprobs"], values, atol=2e-6)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"image_data": ["x"]}, "image_data"),
        ({"sampling_params": make_sampling_params(1, 0.7)}, "temperature"),
    ],
)
def test_what_rows_are_not(address: str, changed: dict[str, Any], field: str) -> None:
    fields = {"prompt_ids": [1, 2], "sampling_params": make_sampling_params(1), **changed}
    with pytest.raises(InvalidInput) as exc_info:
        asyncio.run(DistillTeacher(address).generate("1", **fields))
    assert exc_info.value.field == field


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("loss", "k"), [("k3", 0), ("forward_kl_topk", 6)])
def test_the_manager_of_verl(address: str, loss: str, k: int) -> None:
    """verl's own configuration and the manager of its workers, unchanged; no Ray and no GPU."""
    from hydra import compose, initialize_config_module
    from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                "distillation.enabled=True",
                "distillation.nnodes=1",
                "distillation.n_gpus_per_node=1",
                "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
                f"distillation.teacher_models.teacher_model.model_path={address}",
                f"distillation.distillation_loss.loss_mode={loss}",
                "distillation.distillation_loss.topk=6",
                "actor_rollout_ref.rollout.name=vllm",
            ],
        )
    ids = tokens(40)
    manager = AsyncTeacherLLMServerManager(config, DistillTeachers(config, None).get_client())
    teacher_rows = asyncio.run(manager.compute_teacher_logprobs_single(ids))
    heads, values = expected(ids, k)
    np.testing.assert_array_equal(teacher_rows[0], heads)
    np.testing.assert_allclose(teacher_rows[1], values, atol=2e-6)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verl_takes_the_adapter() -> None:
    code = "import verl.trainer.ppo.v1.trainer_base as base; print(base.MultiTeacherModelManager)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "deploy.adapters.verl"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert "deploy.adapters.verl.DistillTeachers" in process.stdout, process.stderr[-4000:]
