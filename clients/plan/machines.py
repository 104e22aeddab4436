"""The figures of the GPUs that `distill plan` knows, for the time of a step.

The sources are NVIDIA's data sheets of each GPU (dense rates, without sparsity) and of the DGX
system with eight such GPUs (network). The shares of peak performance that programs reach are
assumptions, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFigures:
    """The figures of one GPU, per second.

    - bf16, float32: peak operations of matrix products with these inputs (float32: as TF32).
    - memory: bytes per second of its memory.
    - size: its memory in GiB.
    - link: bytes per second that a GPU sends to the others of its machine.
    - network: bytes per second that a GPU sends to other machines.
    - host: bytes per second from GPU to host.
    - product_share, memory_share, link_share: the part of a peak that programs reach.
    - launch: seconds of the host for one decoding step of an engine.
    """

    bf16: float
    float32: float
    memory: float
    size: int
    link: float
    network: float
    host: float
    product_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.7
    launch: float = 3e-3

    def products(self, *, bf16: bool) -> float:
        """Return the operations per second that matrix products reach."""
        return self.product_share * (self.bf16 if bf16 else self.float32)

    @property
    def traffic(self) -> float:
        """Bytes per second of memory that programs reach."""
        return self.memory_share * self.memory


MACHINES: Mapping[str, GpuFigures] = {
    # "NVIDIA A100 Tensor Core GPU" data sheet, SXM 80 GB; DGX A100: 200 Gbit/s per GPU, PCIe 4.
    "A100": GpuFigures(312e12, 156e12, 2.039e12, 80, 300e9, 25e9, 32e9),
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM; DGX H100: 400 Gbit/s per GPU, PCIe 5.
    "H100": GpuFigures(989e12, 494.5e12, 3.35e12, 80, 450e9, 50e9, 64e9),
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM; DGX H200.
    "H200": GpuFigures(989e12, 494.5e12, 4.8e12, 141, 450e9, 50e9, 64e9),
    # "NVIDIA DGX B200" data sheet, an eighth of the system.
    "B200": GpuFigures(2250e12, 1125e12, 8e12, 180, 900e9, 50e9, 64e9),
}
GPUS_OF_MACHINE = 8  # processes on more GPUs also use the network
