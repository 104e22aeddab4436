"""How the student lies in the processes of a job: whole in each one, or shared out among them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from student_trainer.losses import FusedLoss
from student_trainer.model.student import Student


class Replicated:
    """Every process has all weights and their optimizer: DDP, or the only process there is."""

    def __init__(self, accelerator: Accelerator, student: Student) -> None:
        self.trained = self.whole = student.to(accelerator.device)
        self.device = accelerator.device
        self._accelerator = accelerator
        self._wrapped = accelerator.prepare(student)

    def __call__(self, *inputs: Any) -> FusedLoss:
        """Student.forward; all processes call it equally often."""
        loss: FusedLoss = self._wrapped(*inputs)
        return loss

    def synchronized(self, last: bool) -> Any:
        """Around forward and backward: gradients cross with the step's `last` micro-batch."""
        return nullcontext() if last else self._accelerator.no_sync(self._wrapped)

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, `whole` may be called by any process as often as it likes."""
        return nullcontext()

    def total(self, sums: Tensor) -> Tensor:
        """Of sums over the weights that a process has, those over all weights; all must call."""
        return sums


class Sharded:
    """Every process has a share of each weight and of its moments, and learns as if it had all
    (FSDP2): a layer's weights are gathered for its forward and its backward pass.

    To write answers takes each layer once a token: for that, the weights are gathered once, into
    the hollow copy `whole`, which no collective stands behind.
    """

    def __init__(self, accelerator: Accelerator, student: Student) -> None:
        self.device = accelerator.device
        self._accelerator = accelerator
        self.whole = _hollow(student).to(accelerator.device).eval()
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        layers = student.model._no_split_modules or ()
        for module in list(student.model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh)
        # The rest: embeddings, last norm and head. In place, like every layer above.
        self._root = fully_shard(student, mesh=mesh)
        self.trained = student

    def __call__(self, *inputs: Any) -> FusedLoss:
        """As Replicated's."""
        loss: FusedLoss = self.trained(*inputs)
        return loss

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        """As Replicated's."""
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """As Replicated's; all processes go in together."""
        shares = dict(self.trained.named_parameters())
        copies = dict(self.whole.named_parameters())
        for name, share in shares.items():
            copies[name].data = whole(share.detach())
        try:
            yield
        finally:
            for hollow in copies.values():
                hollow.data = hollow.data.new_empty(0)

    def total(self, sums: Tensor) -> Tensor:
        """As Replicated's."""
        everywhere: Tensor = self._accelerator.reduce(sums)
        return everywhere


def spread(accelerator: Accelerator, student: Student, sharding: str) -> Replicated | Sharded:
    """`sharding`: as in train.sharding; one process has nothing to share."""
    if sharding == "fsdp2" and accelerator.num_processes > 1:
        return Sharded(accelerator, student)
    return Replicated(accelerator, student)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which every process may have a share; then all must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Each tensor as a whole, on the CPU if it was in shares. Every process must call; those that
    do not `keep` get nothing. What was one tensor under two names still is.
    """
    found: dict[int, Tensor] = {}
    for number, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
        gathered = whole(tensor.detach())
        if keep:
            found[number] = gathered.cpu() if isinstance(tensor, DTensor) else gathered
    return {name: found[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def share_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of `tensor`, which is as large as `parameter` and known to all."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _hollow(student: Student) -> Student:
    """A copy with the same buffers, and parameters of no elements."""
    return copy.deepcopy(
        student,
        {
            id(parameter): nn.Parameter(parameter.data.new_empty(0), parameter.requires_grad)
            for parameter in student.parameters()
        },
    )
