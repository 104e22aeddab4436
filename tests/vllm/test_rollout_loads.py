"""Loads of weights by the vllm rollout engine: with sequences in flight, and every way to fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protos.errors import Corrupt, WrongState
from student_trainer.rollout_client.order import InFlight, Order, SequenceRequest, WeightsVersion
from student_trainer.rollout_client.snapshot import Probe, seal
from student_trainer.rollout_service.engines.vllm_running import RunningOrder
from student_trainer.rollouts.sampler import SampledTokens

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm has vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.timeout(600),  # a start of vLLM takes 20 s, on a machine with other work minutes
]

from tests.vllm.rollouts import (  # noqa: E402
    END_IDS,
    SETTINGS,
    Service,
    Student,
    assert_sampled,
    exact_logits,
    order_of,
    prompts,
    sampled,
)

# So many loads; more in a long test.
LOADS = max(50, int(os.environ.get("DISTILL_REPEATS", "50")))
LONG = 850


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def service(student: Student) -> Iterator[Service]:
    service = Service(student.path)
    yield service
    service.close()


def changed(student: Student, in_flight: InFlight = "drain") -> WeightsVersion:
    student.learn()
    return student.snapshot(in_flight)


def in_flight_order(version: WeightsVersion) -> Order:
    """Eight long sequences that no end token ends, and one that ends at once."""
    before = [torch.arange(140) % 97, *prompts(7, 100, seed=7), torch.tensor([1])]
    settings = replace(SETTINGS, stream_tokens=LONG)
    return order_of(version, before, [LONG] * 8 + [1], settings)


async def loaded_in_flight(
    service: Service, order: Order, version: WeightsVersion, new: Order
) -> tuple[list[SampledTokens], list[SampledTokens]]:
    """Sample an order, and load another version when its first sequence has ended.

    Returns its sequences and those of `new`, which is sampled from then on.
    """
    samples: dict[int, SampledTokens] = {}
    sampling = service.engine.sample(order)
    index, tokens = await anext(sampling)
    samples[index] = tokens
    await service.engine.load(version)
    later = asyncio.ensure_future(sampled(service.engine, new))
    async for index, tokens in sampling:
        samples[index] = tokens
    return [samples[index] for index in range(len(samples))], await later


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Student, Service]]:
    """A student without end tokens."""
    student = Student(tmp_path_factory.mktemp("endless"), ends=())
    service = Service(student.path)
    yield student, service
    service.close()


def test_it_samples_the_same_after_it_has_slept(student: Student, service: Service) -> None:
    """On a CPU vLLM frees nothing; what it does around that is the same as on a GPU."""
    version = changed(student)
    service.load(version)
    order = order_of(version, prompts(5, 60), 30)
    [expected] = service.sample(order)
    for _ in range(2):
        service.run(service.engine.sleep())
        with pytest.raises(WrongState, match="dropped when it fell asleep"):
            service.sample(order)
        service.load(version)
        [samples] = service.sample(order)
        for sample, expected_sample in zip(samples, expected, strict=True):
            assert torch.equal(sample.token_ids, expected_sample.token_ids)
            assert torch.equal(sample.head_ids, expected_sample.head_ids)
    service.run(service.engine.sleep())
    new = order_of(changed(student), prompts(5, 60), 30)
    service.load(new.weights)
    [samples] = service.sample(new)
    for sequence, got in zip(new.sequences, samples, strict=True):
        assert got.versions == ((student.number, len(got.token_ids)),)
        logits = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, new.settings, got, logits)


def test_recompute_goes_on_with_the_new_weights(endless: tuple[Student, Service]) -> None:
    """Each token is of the version that it names, and of no KV cache of an older one."""
    student, service = endless
    old_version = changed(student)
    service.load(old_version)
    old = student.frozen()
    order = in_flight_order(old_version)
    new_version = changed(student, "recompute")
    new = order_of(new_version, [order.sequences[0].token_ids] * 3, 20, first=100)
    samples, later = service.run(loaded_in_flight(service, order, new_version, new))
    students_by_version = {old.number: old, student.number: student}
    for sequence, got in zip(order.sequences[:8], samples[:8], strict=True):
        assert [number for number, _ in got.versions] == [old.number, student.number]
        assert sum(count for _, count in got.versions) == LONG
        assert_sampled(
            sequence, order.settings, got, exact_logits(students_by_version, sequence, got), ()
        )
    assert samples[8].versions == ((old.number, 1),)
    for sequence, got in zip(new.sequences, later, strict=True):
        assert got.versions == ((student.number, 20),)
        assert_sampled(
            sequence, new.settings, got, exact_logits(students_by_version, sequence, got), ()
        )


@torch.no_grad()
def kept_logits(
    old: Student, new: Student, sequence: SequenceRequest, got: SampledTokens
) -> Tensor:
    """The logits before each token if the KV cache of the older weights is kept."""
    (_, first), (_, remaining_count) = got.versions
    all_token_ids = torch.cat([sequence.token_ids, got.token_ids[:-1]])
    # The last token of the old version was sampled, but not yet read, before the load.
    cached_count = len(all_token_ids) - remaining_count
    before = old.model(all_token_ids[None, :cached_count], use_cache=True)
    after = new.model(all_token_ids[None, cached_count:], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits[0, -first:], after.logits[0]])
    return logits.double()


def test_keep_goes_on_with_the_old_cache(endless: tuple[Student, Service]) -> None:
    """A new order with the same prompt must not find the old blocks of the running one."""
    student, service = endless
    old_version = changed(student)
    service.load(old_version)
    old = student.frozen()
    order = in_flight_order(old_version)
    new_version = changed(student, "keep")
    new = order_of(new_version, [order.sequences[0].token_ids] * 3, 20, first=100)
    samples, later = service.run(loaded_in_flight(service, order, new_version, new))
    for sequence, got in zip(order.sequences[:8], samples[:8], strict=True):
        assert [number for number, _ in got.versions] == [old.number, student.number]
        assert_sampled(sequence, order.settings, got, kept_logits(old, student, sequence, got), ())
    for sequence, got in zip(new.sequences, later, strict=True):
        exact = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, new.settings, got, exact, ())


def test_keep_gives_no_old_blocks_to_sequences_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences run at a time; the first has left blocks of the prompt that all share."""
    student = Student(tmp_path, ends=())
    old_version = student.snapshot()
    limits = [1] + [LONG] * 9 + [60] * 4
    order = order_of(old_version, [torch.arange(140) % 97] * len(limits), limits)
    order = replace(order, settings=replace(SETTINGS, stream_tokens=LONG))
    new_version = changed(student, "keep")
    new = order_of(new_version, [torch.tensor([1])], 1)
    service = Service(student.path, max_batch_tokens=8)  # and so many sequences at once
    submit, submitted = service.engine._submit, list[int]()

    def record(running: RunningOrder, index: int) -> None:
        if running.order is order:
            submitted.append(index)
        submit(running, index)

    monkeypatch.setattr(service.engine, "_submit", record)
    try:
        service.load(old_version)
        samples, _ = service.run(loaded_in_flight(service, order, new_version, new))
    finally:
        service.close()
    again = submitted[len(limits) :]
    assert set(again) >= {11, 12, 13}
    for index in again:
        sequence, got = order.sequences[index], samples[index]
        assert got.versions == ((student.number, len(got.token_ids)),)
        exact = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, order.settings, got, exact, ())


def test_blocks_of_older_weights_are_not_found(student: Student, service: Service) -> None:
    """The prompts have whole blocks in vLLM's prefix cache, which a load does not clear."""
    before = [torch.arange(300) % 101] * 4
    for _ in range(2):
        version = changed(student)
        service.load(version)
        order = order_of(version, before, 10)
        for sequence, got in zip(order.sequences, service.sample(order)[0], strict=True):
            exact = exact_logits({student.number: student}, sequence, got)
            assert_sampled(sequence, order.settings, got, exact)


def small_order(student: Student, version: WeightsVersion) -> Order:
    return order_of(version, prompts(4, 20), 5)


def assert_unusable(student: Student, service: Service) -> None:
    """No order may be sampled before a load succeeds; then it may."""
    order = small_order(student, student.snapshot())
    with pytest.raises(WrongState, match="no verified weights"):
        service.sample(order)
    service.load(student.snapshot())
    for sequence, got in zip(order.sequences, service.sample(order)[0], strict=True):
        exact = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, order.settings, got, exact)


def test_a_half_written_snapshot(student: Student, service: Service, tmp_path: Path) -> None:
    complete_snapshot = changed(student)
    service.load(complete_snapshot)
    half = tmp_path / "half"
    half.mkdir()
    data = (complete_snapshot.directory / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(Corrupt, match="not a complete snapshot"):
        service.load(replace(complete_snapshot, directory=half))
    (half / "snapshot.json").write_bytes(
        (complete_snapshot.directory / "snapshot.json").read_bytes()
    )
    (half / "probe.safetensors").write_bytes(
        (complete_snapshot.directory / "probe.safetensors").read_bytes()
    )
    with pytest.raises(Corrupt, match=r"the checksum of model\.safetensors"):
        service.load(replace(complete_snapshot, directory=half))
    assert_unusable(student, service)


def test_a_snapshot_of_another_model(student: Student, service: Service, tmp_path: Path) -> None:
    """Of fewer layers, and with as many weights in another shape, which vLLM would fail to load."""
    version = changed(student)
    weights = load_file(version.directory / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    weights[name] = weights[name].T.contiguous()
    turned = tmp_path / "turned"
    turned.mkdir()
    save_file(weights, turned / "model.safetensors")
    seal(turned, number=version.number, dtype="float32", probe=student.probe())
    with pytest.raises(Corrupt, match=rf"has {name} in shape \[128, 64\], but .* \[64, 128\]"):
        service.load(replace(version, directory=turned))
    other_student = Student(tmp_path, layers=2)
    with pytest.raises(Corrupt, match=r"has no model\.layers\.2\.input"):
        service.load(other_student.snapshot())
    assert_unusable(student, service)


def tampered(version: WeightsVersion, to: Path, probe: Probe, number: int) -> WeightsVersion:
    """The weights of a version with another probe."""
    to.mkdir()
    save_file(load_file(version.directory / "model.safetensors"), to / "model.safetensors")
    seal(to, number=number, dtype="float32", probe=probe)
    return replace(version, directory=to, number=number)


def test_a_wrong_probe_ends_what_runs(endless: tuple[Student, Service], tmp_path: Path) -> None:
    """The tokens that were sampled before the probe was scored are not given out."""
    student, service = endless
    good = changed(student)
    service.load(good)
    probe = student.probe()
    logprobs = probe.logprobs.clone()
    logprobs[1, 5] += 0.01
    number = student.number + 1000
    bad = tampered(good, tmp_path / "bad", Probe(probe.token_ids, logprobs), number)
    bad = replace(bad, in_flight="recompute")

    async def load_in_flight() -> None:
        sampling = service.engine.sample(in_flight_order(good))
        await anext(sampling)
        with pytest.raises(Corrupt, match="does not have the weights"):
            await service.engine.load(bad)
        with pytest.raises(Corrupt, match="does not have the weights"):
            await anext(sampling)

    service.run(load_in_flight())
    order = small_order(student, good)
    with pytest.raises(WrongState, match="does not have the weights"):
        service.sample(order)
    service.load(good)
    assert len(service.sample(order)[0]) == 4


def test_a_load_goes_on_if_its_caller_is_cancelled(student: Student, service: Service) -> None:
    version = changed(student)

    async def cancelled_load() -> None:
        load = asyncio.ensure_future(service.engine.load(version))
        while not service.engine._loading.locked():
            await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        async with service.engine._loading:
            pass

    service.run(cancelled_load())
    order = small_order(student, version)
    for sequence, got in zip(order.sequences, service.sample(order)[0], strict=True):
        assert got.versions == ((version.number, len(got.token_ids)),)
        exact = exact_logits({student.number: student}, sequence, got)
        assert_sampled(sequence, order.settings, got, exact, END_IDS)


def test_memory_is_flat_over_many_loads(tmp_path: Path) -> None:
    """In a process of its own, because other tests leave memory that moves.

    Weights of 17 MB: a copy that stays after each load would be hundreds of MB.
    """
    command = [sys.executable, "-m", "tests.vllm.rollout_memory", str(tmp_path), str(LOADS)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    measured = json.loads(process.stdout.splitlines()[-1])
    used, size = measured["bytes_used"], measured["bytes_of_weights"]
    assert size > 15e6
    assert len(used) == LOADS
    assert statistics.median(used[-20:]) - statistics.median(used[:20]) < size, used
