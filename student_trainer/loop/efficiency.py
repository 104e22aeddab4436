"""Efficiency metrics of a step: tokens per second of a process, model FLOPs utilisation (MFU), and
memory.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from student_trainer.model.student import Student
from student_trainer.teachers.source import PendingRows


class LearningFlops:
    """Counts the floating-point operations of one forward and backward pass of a sequence.

    The count follows appendix B of PaLM (arXiv 2204.02311). For each token, a weight of a linear
    module takes 2 operations in the forward pass and 2 for the gradient of the module's input. A
    trained weight takes 2 more for its own gradient. N trained weights thus take 6 N operations.
    Attention takes 12 * layers * width of the queries * tokens operations per token, as if every
    token attended to all others. As usual for MFU, the count excludes embeddings, norms, softmax,
    and the recomputation of gradient checkpointing.

    The head runs only on the learned tokens, all other modules run on all tokens. The experts of a
    mixture are not counted, so the count of a mixture is a lower bound.
    """

    def __init__(self, student: Student) -> None:
        """Count the weights of `student`. The student may already be sharded."""
        head = student.model.get_output_embeddings()
        body_modules = [
            module
            for module in student.linear
            if isinstance(module, nn.Linear) and module is not head
        ]
        self._body = sum(_count_operations(module.weight) for module in body_modules)
        self._head = _count_operations(head.weight) if head is not None else 0
        config = student.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)  # 0: a model without attention
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        self._attention = 12 * config.num_hidden_layers * heads * width

    def count_sequence(self, tokens: int, learned: int) -> float:
        """Return the number of operations for one sequence.

        `tokens`: the number of all its tokens. `learned`: the number of its learned tokens.
        """
        return float(tokens * (self._body + self._attention * tokens) + learned * self._head)


def _count_operations(weight: Tensor) -> int:
    return weight.numel() * (6 if weight.requires_grad else 4)


_GIB = 1 << 30

# Part of a device's name -> peak TFLOPS of bfloat16 on tensor cores, without sparsity (float32
# sums). From NVIDIA's data sheets of the devices, and for GeForce the white paper of the Ada
# architecture. The first entry whose words all occur in the device name applies. TF32, in which
# float32 students compute, has half the peak on all devices.
_PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
}
# Devices whose peak is below that of the table: their names contain one of these words.
_SLOWER = {"Laptop", "MIG"}


def peak_flops(device: str, *, bf16: bool) -> float | None:
    """Return the peak number of operations per second of a device; None if the device is unknown.

    `device`: the name of the device. `bf16`: the peak in bfloat16, otherwise in TF32.
    """
    words = set(device.replace("-", " ").split())
    for name, peak in _PEAKS.items():
        if set(name.split()) <= words and not words & _SLOWER:
            return peak * 1e12 * (1 if bf16 else 0.5)
    return None


class Efficiency:
    """Measures the efficiency of this process in each step.

    The count of operations includes forward and backward passes, but no sampling and no scoring.
    """

    def __init__(self, student: Student, device: torch.device, processes: int) -> None:
        self._flops = LearningFlops(student)
        self._device = device
        self._processes = processes
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, bf16=student.bf16)

    def begin(self) -> None:
        """Start a step, and reset the peak of device memory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def flops(self, pending: Sequence[PendingRows]) -> float:
        """Return the number of operations of the forward and backward passes of these sequences."""
        texts = [item.sequence for item in pending]
        return sum(self._flops.count_sequence(len(text.token_ids), text.learned) for text in texts)

    def of_step(self, *, flops: float, learning: float, speed: float) -> dict[str, float]:
        """Return the efficiency metrics of a step.

        - flops: the number of operations, over all processes.
        - learning: the seconds of the forward and backward passes and of the optimizer.
        - speed: the learned tokens per second of the step, over all processes.
        """
        metrics = {"tokens_per_sec/process": speed / self._processes}
        if self._peak is not None and learning > 0:
            metrics["mfu"] = flops / (learning * self._processes * self._peak)
        if self._device.type == "cuda":
            metrics["memory/peak"] = torch.cuda.max_memory_allocated(self._device) / _GIB
            metrics["memory/reserved"] = torch.cuda.max_memory_reserved(self._device) / _GIB
        else:
            metrics["memory/peak"] = _resident_peak() / _GIB
        return metrics


def _resident_peak() -> int:
    """Return the largest resident memory of this process since its start, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
