"""The vllm rollout engine with a student that learns adapters (LoRA): they alone are loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protos.errors import Corrupt, InvalidInput
from student_trainer.rollout_client.snapshot import seal
from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

from tests.vllm.rollouts import (  # noqa: E402
    RANK,
    AdaptedStudent,
    Service,
    Student,
    assert_sampled,
    exact_logits,
    order_of,
    prompts,
    sampled,
)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> AdaptedStudent:
    return AdaptedStudent(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def service(student: AdaptedStudent) -> Iterator[Service]:
    service = Service(student.path, lora_rank=RANK)
    yield service
    service.close()


def test_each_load_brings_the_adapters(student: AdaptedStudent, service: Service) -> None:
    """From adapters that change nothing, as a new job has them, to three different ones."""
    assert service.engine.info.lora_rank == RANK
    before = prompts(8, 60) + [prompts(1, 1)[0].repeat(150)] * 4
    earlier: list[torch.Tensor] = []
    for _ in range(4):
        version = student.snapshot()
        size = (version.directory / "adapter_model.safetensors").stat().st_size
        assert size == pytest.approx(4 * sum(w.numel() for w in weights(student)), rel=0.2)
        service.load(version)
        order = order_of(version, before)
        (samples,) = service.sample(order)
        for sequence, got in zip(order.sequences, samples, strict=True):
            assert got.versions == ((student.number, len(got.token_ids)),)
            logits = exact_logits({student.number: student}, sequence, got)
            assert_sampled(sequence, order.settings, got, logits)
        same = sum(torch.equal(a, b.token_ids) for a, b in zip(earlier, samples, strict=False))
        assert same < 4
        earlier = [got.token_ids for got in samples]
        student.learn()


def weights(student: AdaptedStudent) -> list[torch.Tensor]:
    return [*load_file(student.snapshot().directory / "adapter_model.safetensors").values()]


def test_sequences_in_flight_go_on_with_new_adapters(
    student: AdaptedStudent, service: Service
) -> None:
    student.learn()
    old_version = student.snapshot()
    service.load(old_version)
    old = student.frozen()
    order = order_of(old_version, [*prompts(6, 100), torch.tensor([1])], [400] * 6 + [1])
    order = replace(order, settings=replace(order.settings, stream_tokens=400))
    student.learn()
    new_version = student.snapshot("recompute")

    async def load_in_flight() -> None:
        sampling = service.engine.sample(order)
        samples = dict([await anext(sampling)])
        await service.engine.load(new_version)
        samples |= {index: tokens async for index, tokens in sampling}
        students_by_version = {old.number: old, student.number: student}
        versions = set()
        for index, got in samples.items():
            sequence = order.sequences[index]
            assert_sampled(
                sequence, order.settings, got, exact_logits(students_by_version, sequence, got)
            )
            versions |= {number for number, _ in got.versions}
        assert versions == {old.number, student.number}

    service.run(load_in_flight())


def test_what_is_no_adapter_of_the_student_is_refused(
    student: AdaptedStudent, service: Service, tmp_path: Path
) -> None:
    with pytest.raises(Corrupt, match=r"has lm_head.weight, which the model"):
        service.load(Student(tmp_path).snapshot())
    student.learn()
    version = student.snapshot()
    student.learn()  # the probe of other adapters
    directory = tmp_path / "undelivered"
    directory.mkdir()
    for file in version.directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    seal(directory, number=version.number, dtype="float32", probe=student.probe())
    with pytest.raises(Corrupt, match="does not have the weights of this version"):
        service.load(replace(version, directory=directory))
    service.load(version)
    order = order_of(version, prompts(2, 20), 4)
    assert len(service.run(sampled(service.engine, order))) == 2


def test_a_rank_that_vllm_does_not_have(student: AdaptedStudent) -> None:
    with pytest.raises(InvalidInput, match="at most rank 512") as caught:
        VllmRolloutEngine(str(student.path), lora_rank=513)
    assert caught.value.field == "--lora-rank"
