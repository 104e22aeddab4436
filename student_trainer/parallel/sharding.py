"""Distribute the student over the processes of a job: replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from student_trainer.losses import FusedLoss
from student_trainer.model.loading import cast_weights
from student_trainer.model.student import Student


class Replicated:
    """Every process has all weights and their optimizer state: DDP, or a single process.

    trained: the Student whose weights learn. full: the Student to use inside `gathered()`; the
    same one here. device: of this process.
    """

    def __init__(self, accelerator: Accelerator, student: Student) -> None:
        self.trained = self.full = student.to(accelerator.device)
        self.device = accelerator.device
        self._accelerator = accelerator
        self._wrapped = accelerator.prepare(student)

    def __call__(self, *inputs: Any) -> FusedLoss:
        """Collective. Run `Student.forward`; all processes must call it equally often."""
        loss: FusedLoss = self._wrapped(*inputs)
        return loss

    def synchronized(self, last: bool) -> Any:
        """Return the context for forward and backward of one micro-batch.

        Gradients are averaged over processes in the `last` micro-batch of an update; before it they
        are only added up.
        """
        return nullcontext() if last else self._accelerator.no_sync(self._wrapped)

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context. Inside, `full` holds the full weights.

        Inside, ranks may run different numbers of forward passes of `full`: they are not
        collective, and never compiled.
        """
        return torch.compiler.set_stance("force_eager") if self.full.compiled else nullcontext()

    def total(self, sums: Tensor) -> Tensor:
        """Collective. From sums over the weights of this process, return the sums over all weights.

        Here every process has all weights, so `sums` is returned unchanged.
        """
        return sums


class Sharded:
    """Every process has a shard of each weight, gradient and optimizer state (FSDP2), in float32.

    Training computes the same as with Replicated. The weights of a layer are gathered for its
    forward and its backward pass; those of its linear modules in bfloat16, if the student computes
    in bfloat16. Gradients are added up over processes after each backward pass, so that no process
    holds more than its shard of them and those of one layer. `docs/deployment.md` has the memory of
    a process.

    Sampling runs every layer once per token, so `gathered()` instead gathers all weights once, into
    `full`: a copy of the Student that is empty outside and has no collectives.
    """

    def __init__(self, accelerator: Accelerator, student: Student) -> None:
        """Take this process's share of the student's weights, which may be mapped.

        Weights move to the device layer by layer, and only the shares are cast to float32.
        """
        self.device = accelerator.device
        self._accelerator = accelerator
        self.full = _hollow(student).to(accelerator.device).eval()
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        # Autocast would cast the weights of linear modules before each product; the cast before the
        # gathering halves the traffic and the memory. All other weights are float32 for autocast.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        castable = student.linear if student.bf16 else frozenset()
        linear: list[nn.Module] = []
        layers = student.model._no_split_modules or ()
        # Parts before wholes: `fully_shard` takes the weights that no earlier call took.
        for module in reversed(list(student.model.modules())):
            if type(module).__name__ not in layers:
                continue
            inside = (one for one in module.modules() if one in castable)
            if group := [one for one in inside if not isinstance(one, FSDPModule)]:
                fully_shard(group, mesh=mesh, mp_policy=policy)
                linear += group
            fully_shard(module, mesh=mesh)
        # The other weights: embeddings, last norm and head. `fully_shard` works in place.
        fully_shard(student, mesh=mesh)
        cast_weights(student, bf16=student.bf16)
        self.trained = student
        cast = {id(weight) for one in linear for weight in one.parameters()}
        self._cast = {name for name, of in student.named_parameters() if id(of) in cast}

    def __call__(self, *inputs: Any) -> FusedLoss:
        """Collective. Run `Student.forward`; see Replicated."""
        loss: FusedLoss = self.trained(*inputs)
        return loss

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of one micro-batch.

        Gradients are added up over processes in every one of them, not only in the `last`: FSDP2
        would keep those of all weights until then.
        """
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective. Inside the context `full` holds the full weights; see Replicated.

        Every process must enter it. Each process then needs memory for all weights: those of the
        linear modules in the dtype of the computation, the others in float32.
        """
        shares = dict(self.trained.named_parameters())
        copies = dict(self.full.named_parameters())
        for name, share in shares.items():
            dtype = torch.bfloat16 if name in self._cast else share.dtype
            copies[name].data = full_tensor(share.detach().to(dtype))
        try:
            yield
        finally:
            for hollow in copies.values():
                hollow.data = hollow.data.new_empty(0)

    def total(self, sums: Tensor) -> Tensor:
        """Collective. Return the sums over the weights of all processes; see Replicated."""
        everywhere: Tensor = self._accelerator.reduce(sums)
        return everywhere


def distribute(accelerator: Accelerator, student: Student, sharding: str) -> Replicated | Sharded:
    """Collective. Distribute the student as `sharding` (the key train.sharding) says.

    A single process is always Replicated.
    """
    if sharding == "fsdp2" and accelerator.num_processes > 1:
        return Sharded(accelerator, student)
    return Replicated(accelerator, student)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. Collective if `tensor` is sharded.

    A tensor that is not sharded is returned as it is.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return the shard of `tensor` that this process has, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Collective. Return each tensor unsharded; sharded ones are copied to the CPU.

    Processes with `keep` false take part but return {}. Names that share a tensor share it in the
    result too.
    """
    found: dict[int, Tensor] = {}
    for number, tensor in {id(tensor): tensor for tensor in tensors.values()}.items():
        gathered = full_tensor(tensor.detach())
        if keep:
            found[number] = gathered.cpu() if isinstance(tensor, DTensor) else gathered
    return {name: found[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def rows_of_part(rows: int, part: int, parts: int) -> slice:
    """Return the rows of `part` of `parts`, as `torch.chunk` and FSDP2 divide them.

    The last parts have fewer rows, or none.
    """
    each = -(-rows // parts)
    return slice(min(part * each, rows), min((part + 1) * each, rows))


def own_rows(tensor: Tensor) -> slice:
    """Return the rows of the full tensor that this process has: all, if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    mesh = tensor.device_mesh
    return rows_of_part(len(tensor), mesh.get_local_rank(), mesh.size())


def with_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return a tensor sharded as `like` is, of which this process has `rows`; see `own_rows`.

    It has as many rows as `like`; they may have another shape.
    """
    rows = rows.to(like.device)
    if not isinstance(like, DTensor):
        return rows
    shape = torch.Size((len(like), *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=shape, stride=stride)


def _hollow(student: Student) -> Student:
    """Return a copy of the student with its buffers, and with parameters without elements."""
    return copy.deepcopy(
        student,
        {
            id(parameter): nn.Parameter(parameter.data.new_empty(0), parameter.requires_grad)
            for parameter in student.parameters()
        },
    )
