"""Speed, MFU and memory of a step."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from student_trainer.loop.efficiency import Efficiency, peak_flops
from student_trainer.model.student import Student


@pytest.mark.parametrize(
    ("device", "bf16", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", True, 989e12),
        ("NVIDIA H100 PCIe", True, 756e12),
        ("NVIDIA H200", False, 494.5e12),
        ("NVIDIA A100-SXM4-80GB", True, 312e12),
        ("NVIDIA A100 80GB PCIe", True, 312e12),
        ("NVIDIA L40S", True, 362e12),
        ("NVIDIA L4", True, 121e12),
        ("NVIDIA B200", True, 2250e12),
        ("NVIDIA GeForce RTX 4090", False, 82.6e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", True, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", True, None),
        ("NVIDIA L40", True, None),
        ("", True, None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(
    device: str, bf16: bool, peak: float | None
) -> None:
    assert peak_flops(device, bf16=bf16) == peak


def make_efficiency(processes: int) -> Efficiency:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    return Efficiency(Student(model), torch.device("cpu"), processes)


def test_a_cpu_has_speed_and_memory_but_no_mfu() -> None:
    efficiency = make_efficiency(4)
    efficiency.begin()
    ballast = torch.ones(1 << 26)  # 256 MiB, resident
    metrics = efficiency.of_step(flops=1e12, learning=2.0, speed=100.0)
    assert metrics.keys() == {"tokens_per_sec/process", "memory/peak"}
    assert metrics["tokens_per_sec/process"] == 25
    assert ballast.nbytes / 2**30 < metrics["memory/peak"] < 100


def test_mfu_is_the_share_of_what_all_processes_could_do() -> None:
    efficiency = make_efficiency(4)
    efficiency._peak = 1e12
    metrics = efficiency.of_step(flops=1e12, learning=2.0, speed=100.0)
    assert metrics["mfu"] == 1e12 / (4 * 2.0 * 1e12)
