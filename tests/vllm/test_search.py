"""Conversations with a retriever at a vllm rollout service: the tokens of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.snapshot import seal

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(900),  # a start of vLLM takes 20 s, on a machine with other work minutes
]


def test_the_conversations_of_transformers(tmp_path: Path) -> None:
    """Whole conversations, with their own tokens, passages, queries and draws."""
    from student_trainer.rollout_client.engine_client import EngineClient
    from tests.student_trainer import tiny
    from tests.student_trainer.rollout_service.material import probe_of
    from tests.student_trainer.rollout_service.processes import ServiceProcess
    from tests.student_trainer.rollout_service.test_search import (
        generate_all,
        sample_in_process,
        search_at_engine,
    )
    from tests.student_trainer.rollouts.asking import WORDS, asking_student

    student = asking_student(width=64)  # heads of 32, the least that vLLM has on a CPU
    expected = sample_in_process(student, range(40), 100_000)
    version = WeightsVersion("run.1", 5, tmp_path / "v5")
    version.directory.mkdir()
    weights = {name: of for name, of in student.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, version.directory / "model.safetensors")
    seal(version.directory, number=5, dtype="float32", probe=probe_of(student))
    path = tiny.save(student, WORDS, tmp_path / "student")
    arguments = ("--engine", "vllm", "--model", str(path), "--dtype", "float32")
    service = ServiceProcess(*arguments, log=tmp_path / "service.log")
    try:
        with EngineClient([service.address]) as client:
            conversations = generate_all(search_at_engine(client, version, None), range(40))
    finally:
        service.close()
    assert {conversation.queries for conversation in expected} == {0, 1, 2}
    # Rounding may decide a token where a random number lies on a boundary: about one in 10,000.
    same = [n for n in range(40) if torch.equal(conversations[n].token_ids, expected[n].token_ids)]
    assert len(same) >= 39
    for engine_conversation, expected_conversation in (
        (conversations[n], expected[n]) for n in same
    ):
        assert engine_conversation.own is not None
        assert expected_conversation.own is not None
        assert torch.equal(engine_conversation.own, expected_conversation.own)
        for name in ("queries", "concluded", "truncated", "failed"):
            assert getattr(engine_conversation, name) == getattr(expected_conversation, name)
        torch.testing.assert_close(
            engine_conversation.token_logprobs,
            expected_conversation.token_logprobs,
            rtol=0,
            atol=1e-4,
        )
        assert (
            sum(tokens for _, tokens in engine_conversation.versions) == engine_conversation.learned
        )
