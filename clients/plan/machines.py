"""The speeds and sizes of the machines that `distill plan` knows, for the time of a step.

The sources are NVIDIA's data sheets of each GPU (dense rates, without sparsity) and of the DGX
system with eight such GPUs (network). The shares of the peaks that programs reach, and the seconds
of the host, are assumptions, not measurements. The shares of attention are those that
FlashAttention-2 reaches on an A100 (Dao, arXiv 2307.08691: 50% to 73%) and on an H100 (Shah et al.,
arXiv 2407.08608: 35%). `benchmarks/models/calibration.py` measures the same figures of a CPU.
docs/step-time.md compares the predicted times with the times of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineFigures:
    """The speeds and the memory size of one GPU, or of one core of a CPU.

    - bf16, float32: peak operations per second of matrix products with these inputs (float32: as
      TF32).
    - memory: bytes per second of its memory.
    - size: its memory in GiB.
    - link: bytes per second that a GPU sends to the others of its machine.
    - network: bytes per second that a GPU sends to other machines.
    - host: bytes per second from GPU to host.
    - attention_share, product_share: part of the peak operations that attention and products reach.
    - memory_share, link_share: part of `memory`, and of `link` or `network`, that programs reach.
    - elementwise_share: part of `memory` that operations without a matrix product reach.
    - layer_launch: seconds of the host to launch the forward pass of a layer, without CUDA graphs.
    - token_launch: seconds of the host for the rest of a decoding step of transformers.
    - engine_launch: seconds of the host for a decoding step of vLLM, which replays CUDA graphs.
    - overlaps: whether the host launches operations while earlier ones run, and matrix products
      hide their reads of memory.
    """

    bf16: float
    float32: float
    memory: float
    size: int
    link: float
    network: float
    host: float
    attention_share: float = 0.35
    product_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.7
    elementwise_share: float = 0.8
    layer_launch: float = 1e-3
    token_launch: float = 3e-3
    engine_launch: float = 3e-3
    overlaps: bool = True

    def products(self, *, bf16: bool) -> float:
        """Return the operations per second that matrix products reach."""
        return self.product_share * (self.bf16 if bf16 else self.float32)

    def attention(self, *, bf16: bool) -> float:
        """Return the operations per second that causal attention reaches.

        Causal attention skips half of the scores; skipped operations are not counted.
        """
        return self.attention_share * (self.bf16 if bf16 else self.float32)

    @property
    def reads(self) -> float:
        """Bytes per second at which a decoding step reads weights, and cached keys and values."""
        return self.memory_share * self.memory

    @property
    def traffic(self) -> float:
        """Bytes per second that operations without a matrix product read and write."""
        return self.elementwise_share * self.memory

    def together(self, *seconds: float) -> float:
        """Return the seconds of a pass from the seconds of its parts.

        If the machine overlaps the parts, as a GPU does, the result is the longest part. Otherwise
        it is the sum.
        """
        return max(seconds) if self.overlaps else sum(seconds)


MACHINES: Mapping[str, MachineFigures] = {
    # "NVIDIA A100 Tensor Core GPU" data sheet, SXM 80 GB; DGX A100: 200 Gbit/s per GPU, PCIe 4.
    "A100": MachineFigures(312e12, 156e12, 2.039e12, 80, 300e9, 25e9, 32e9, attention_share=0.6),
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM; DGX H100: 400 Gbit/s per GPU, PCIe 5.
    "H100": MachineFigures(989e12, 494.5e12, 3.35e12, 80, 450e9, 50e9, 64e9),
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM; DGX H200.
    "H200": MachineFigures(989e12, 494.5e12, 4.8e12, 141, 450e9, 50e9, 64e9),
    # "NVIDIA DGX B200" data sheet, an eighth of the system.
    "B200": MachineFigures(2250e12, 1125e12, 8e12, 180, 900e9, 50e9, 64e9),
}
GPUS_OF_MACHINE = 8  # processes on more GPUs also use the network
