"""Distributes the student over the processes of a job: replicated (DDP) or sharded (FSDP2).

With tensor parallelism, the processes form a mesh with the two dimensions "data" and "tensor". A
row of the mesh is a group: its processes divide the linear modules of each layer
(`tensor_parallel.py`). FSDP2 then shards the part of each process over the processes of its column.

With context parallelism, a group divides the tokens of each sequence (`context_parallel.py`), and
FSDP2 shards the weights over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from clients.config.tables.common import StudentConfig
from student_trainer.data.batch import Batch
from student_trainer.losses import FusedLoss, Rows
from student_trainer.model.attention import choose_attention
from student_trainer.model.loading import cast_weights
from student_trainer.model.student import Student, hollow_copy
from student_trainer.parallel.collectives import max_over_ranks
from student_trainer.parallel.context_parallel import ContextGroup, check_divided
from student_trainer.parallel.shards import full_tensor, local
from student_trainer.parallel.tensor_parallel import divide, parallel_styles

AnyBatch = TypeVar("AnyBatch", bound=Batch)
Group = TypeVar("Group")


class Replicated:
    """A student of which every process has all weights and all optimizer state.

    With several processes, the student is wrapped by DDP.

    - trained: the Student that is trained.
    - full: the Student to use inside `gathered()`; here the same object.
    - device: the device of this process.
    - gradient_ranks: the number of processes over which gradients are averaged.
    """

    def __init__(self, accelerator: Accelerator, student: Student) -> None:
        self.trained = self.full = student.to(accelerator.device)
        self.device = accelerator.device
        self.gradient_ranks = accelerator.num_processes
        self._accelerator = accelerator
        self._wrapped = accelerator.prepare(student)

    def __call__(self, *inputs: Any) -> FusedLoss:
        """Collective. Run `Student.forward`.

        All processes must call this method the same number of times.
        """
        loss: FusedLoss = self._wrapped(*inputs)
        return loss

    def forward(self, *inputs: Any) -> FusedLoss:
        """Run `Student.forward` without a gradient. Call it inside `passes()`."""
        loss: FusedLoss = self.trained(*inputs)
        return loss

    def rows(self, *inputs: Any, **options: Any) -> tuple[Tensor, Rows]:
        """Run `Student.rows`. Call it inside `passes()`."""
        return self.trained.rows(*inputs, **options)

    def states(self, batch: Batch) -> Tensor:
        """Run `Student.states`. Call it inside `passes()`."""
        return self.trained.states(batch)

    def passes(self) -> AbstractContextManager[None]:
        """Return the context for passes without a gradient; see `parallel/passes.py`."""
        return self.gathered()

    def shared_batches(
        self, groups: Sequence[Group], batch_of: Callable[[Group], AnyBatch]
    ) -> Iterator[AnyBatch]:
        """Yield the batch of each group. Not collective, unlike `Sharded.shared_batches`."""
        return map(batch_of, groups)

    def synchronized(self, is_last: bool) -> Any:
        """Return the context for the forward and backward pass of one micro-batch.

        `is_last`: whether this is the last micro-batch of an update. Only then are the gradients
        averaged over the processes; before, each process only accumulates its own gradients.
        """
        return nullcontext() if is_last else self._accelerator.no_sync(self._wrapped)

    def gathered(self) -> AbstractContextManager[None]:
        """Return the context in which `full` has the full weights.

        In this context, the forward passes of `full` are neither collective nor compiled. Each rank
        may run any number of them.
        """
        return torch.compiler.set_stance("force_eager") if self.full.compiled else nullcontext()

    def sum_over_shards(self, sums: Tensor) -> Tensor:
        """Collective. Return sums over all weights, from `sums` over the weights of this process.

        Every process has all weights, so `sums` is returned unchanged.
        """
        return sums

    def counts_share_of(self, weight: Tensor) -> bool:
        """Return whether this process includes its share of `weight` in the sums for
        `sum_over_shards`.
        """
        return True

    def choose_attention(self, settings: StudentConfig) -> None:
        """Choose the attention and the layout of the student; see `model/attention.py`.

        Raises InvalidInput (`student.attention`).
        """
        with self.passes():
            choose_attention(self.trained, self.full, settings)

    def batches_of_group(self, batch: AnyBatch) -> Sequence[tuple[AnyBatch, bool]]:
        """Return [(batch, True)]: there are no groups of processes.

        See `Sharded.batches_of_group`.
        """
        return [(batch, True)]


class Sharded:
    """A student of which every process has a shard of each weight, gradient and optimizer state
    (FSDP2).

    The shards are float32. With `cpu_offload`, they are in host memory: the shards of a layer are
    copied to the device when a pass needs them, and their gradients are copied back.

    Training computes the same as with Replicated. The weights of a layer are gathered for its
    forward pass, and again for its backward pass. If the student computes in bfloat16, the weights
    of linear modules are gathered in bfloat16. Gradients are reduced over the processes after each
    backward pass, so a process has its shard of the gradients and the full gradients of at most one
    layer. `docs/training.md` gives the memory of a process.

    Sampling runs every layer once per token. `gathered()` therefore gathers all weights once, into
    `full`. `full` is a copy of the Student without collectives, which has no weights outside of
    this context.

    With tensor or context parallelism, the processes of a group compute gradients together, for the
    batches of each process in turn (`batches_of_group`). In all other work, including sampling,
    each process handles its own sequences, so other parts of a job do not depend on groups.

    - trained, full, device, gradient_ranks: see Replicated.
    - context: with context parallelism, the group of this process; otherwise None.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: Student,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        *,
        cpu_offload: bool = False,
    ) -> None:
        """Shard the weights of `student`, in place. The weights may be mapped from files.

        The weights move to the device layer by layer, and only the shards are cast to float32.
        `tensor_parallel`, `context_parallel`: the number of processes in a group; 1: no groups. At
        least one of the two must be 1. Raises InvalidInput (`train.tensor_parallel`) if the student
        cannot be divided.
        """
        self.device = accelerator.device
        self.gradient_ranks = accelerator.num_processes // tensor_parallel
        self._accelerator = accelerator
        self.full = hollow_copy(student).to(accelerator.device).eval()
        self._tensor_group: DeviceMesh | None = None
        self.context: ContextGroup | None = None
        styles: dict[nn.Module, ParallelStyle] = {}
        mesh = init_device_mesh(self.device.type, (accelerator.num_processes,))
        if tensor_parallel > 1:
            mesh_2d = _mesh_of_groups(accelerator, tensor_parallel, "tensor")
            mesh, self._tensor_group = mesh_2d["data"], mesh_2d["tensor"]
            styles = parallel_styles(student.model)
        elif context_parallel > 1:
            groups = _mesh_of_groups(accelerator, context_parallel, "context")
            self.context = ContextGroup(groups.get_group("context"))
            self.context.divide(student.model)
        # Autocast would cast the weights of linear modules before each product; the cast before the
        # gathering halves the traffic and the memory. All other weights are float32 for autocast.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        offload_policy = (
            CPUOffloadPolicy(self.device.type == "cuda") if cpu_offload else OffloadPolicy()
        )
        shard = partial(fully_shard, mesh=mesh, offload_policy=offload_policy)
        castable = student.linear if student.bf16 else frozenset()
        linear: list[nn.Module] = []
        layers = student.model._no_split_modules or ()
        # Submodules first: `fully_shard` takes the weights that no earlier call took.
        for module in reversed(list(student.model.modules())):
            if type(module).__name__ not in layers:
                continue
            if self._tensor_group is not None:
                divide(module, styles, self._tensor_group)
            group = [
                submodule
                for submodule in module.modules()
                if submodule in castable and not isinstance(submodule, FSDPModule)
            ]
            if group:
                shard(group, mp_policy=policy)
                linear += group
            shard(module)
        # The remaining weights: embeddings, last norm and head. `fully_shard` works in place.
        shard(student)
        for method in ("rows", "states", "line_states"):
            register_fsdp_forward_method(student, method)
        cast_weights(student, bf16=student.bf16)
        self.trained = student
        cast_ids = {id(weight) for module in linear for weight in module.parameters()}
        self._cast = {name for name, weight in student.named_parameters() if id(weight) in cast_ids}

    def __call__(self, *inputs: Any) -> FusedLoss:
        """Collective. Run `Student.forward`.

        All processes must call this method the same number of times. The processes of a group must
        pass the same batch.
        """
        if self.context is not None:
            return self.context.loss(self.trained, *inputs)
        loss: FusedLoss = self.trained(*inputs)
        return loss

    def forward(self, *inputs: Any) -> FusedLoss:
        """Collective. Run `Student.forward` without a gradient. Call it inside `passes()`."""
        return self(*inputs)

    def rows(self, *inputs: Any, **options: Any) -> tuple[Tensor, Rows]:
        """Collective. Run `Student.rows`. Call it inside `passes()`.

        The processes of a group must pass the same batch.
        """
        if self.context is not None:
            return self.context.rows(self.trained, *inputs, **options)
        return self.trained.rows(*inputs, **options)

    def states(self, batch: Batch) -> Tensor:
        """Collective. Run `Student.states`. Call it inside `passes()`.

        The processes of a group must pass the same batch.
        """
        if self.context is not None:
            return self.context.all_states(self.trained, batch)
        return self.trained.states(batch)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Collective. Context for passes without a gradient; see `parallel/passes.py`.

        The weights of a layer are gathered only while a pass runs the layer. FSDP2 keeps the
        weights of embeddings and head until the context ends.
        """
        with torch.compiler.set_stance("force_eager") if self.trained.compiled else nullcontext():
            try:
                yield
            finally:
                cast(FSDPModule, self.trained).reshard()

    def shared_batches(
        self, groups: Sequence[Group], batch_of: Callable[[Group], AnyBatch]
    ) -> Iterator[AnyBatch]:
        """Collective. Yield the batch of each group, and then batches without rows.

        Every process gets as many batches as the process that has the most groups.
        """
        max_batches = max_over_ranks(self._accelerator, len(groups))
        spare = batch_of(groups[-1]).without_rows() if groups else None
        if max_over_ranks(self._accelerator, int(spare is None)) and max_batches:
            # A process without groups takes the spare batch of another process.
            on_cpu = None if spare is None else spare.to(torch.device("cpu"))
            spare_batches = (batch for batch in gather_object([on_cpu]) if batch is not None)
            spare = next(spare_batches).to(self.device)
        yield from map(batch_of, groups)
        for _ in range(max_batches - len(groups)):
            yield cast(AnyBatch, spare)

    def synchronized(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context for the forward and backward pass of one micro-batch.

        `is_last` has no effect: gradients are reduced over the processes in every micro-batch.
        Otherwise, FSDP2 would keep the full gradients of all weights until the last micro-batch.
        """
        return nullcontext()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective. Context in which `full` has the full weights; see `Replicated.gathered`.

        Every process must enter the context. Each process then needs memory for all weights: those
        of linear modules in the compute dtype, all others in float32.
        """
        shares = dict(self.trained.named_parameters())
        copies = dict(self.full.named_parameters())
        for name, share in shares.items():
            dtype = torch.bfloat16 if name in self._cast else share.dtype
            copies[name].data = full_tensor(share.detach().to(self.device, dtype))
        try:
            yield
        finally:
            for copy in copies.values():
                copy.data = copy.data.new_empty(0)

    def sum_over_shards(self, sums: Tensor) -> Tensor:
        """Collective. Return sums over all weights, from `sums` over this process's shards."""
        global_sums: Tensor = self._accelerator.reduce(sums)
        return global_sums

    def counts_share_of(self, weight: Tensor) -> bool:
        """Return whether this process includes its share of `weight` in the sums for
        `sum_over_shards`.

        If all processes of a group have the same share, only the first process includes it.
        """
        group = self._tensor_group
        return group is None or group.get_local_rank() == 0 or _is_divided(weight)

    def average_in_group(self, gradients: Iterable[Tensor]) -> None:
        """Collective. Average, in place, the gradients of weights that a group does not divide.

        These gradients are equal in all processes of the group, unless a kernel of the device adds
        in an order that varies. The average keeps the copies of a weight equal in this case too.
        """
        if self._tensor_group is None:
            return
        for gradient in gradients:
            if not _is_divided(gradient):
                torch.distributed.all_reduce(local(gradient), group=self._tensor_group.get_group())
                local(gradient).div_(self._tensor_group.size())

    def choose_attention(self, settings: StudentConfig) -> None:
        """Collective. Choose the attention and the layout of the student; see `model/attention.py`.

        With context parallelism, also check that a group can divide the tokens of this student.
        Raises InvalidInput (`student.attention`, `train.context_parallel`).
        """
        if self.context is None:
            with self.passes():
                choose_attention(self.trained, self.full, settings)
            return
        with self.gathered():  # the check compares with the undivided student
            choose_attention(self.full, self.trained, settings)
            check_divided(self._accelerator, self.context, self.trained, self.full)
        cast(FSDPModule, self.trained).reshard()  # FSDP2 keeps the gathered embeddings

    def batches_of_group(self, batch: AnyBatch) -> Sequence[tuple[AnyBatch, bool]]:
        """Collective. Return the batches of all processes of this process's group, in the order of
        ranks.

        Each batch comes with True if it is `batch`, otherwise False. All processes of the group get
        the same batches. Without groups, only `batch` is returned.
        """
        group = self.context.group if self.context is not None else None
        if self._tensor_group is not None:
            group = self._tensor_group.get_group()
        if group is None:
            return [(batch, True)]
        batches: list[Any] = [None] * torch.distributed.get_world_size(group)
        on_cpu = batch.to(torch.device("cpu"))
        torch.distributed.all_gather_object(batches, on_cpu, group=group)
        own_rank = torch.distributed.get_rank(group)
        return [
            (group_batch.to(self.device), number == own_rank)
            for number, group_batch in enumerate(batches)
        ]


def distribute(
    accelerator: Accelerator,
    student: Student,
    sharding: str,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    *,
    cpu_offload: bool = False,
) -> Replicated | Sharded:
    """Collective. Distribute the student over the processes, as the job's table `train` says.

    Returns Replicated for a single process, unless `cpu_offload` is set.
    """
    if sharding == "fsdp2" and (accelerator.num_processes > 1 or cpu_offload):
        groups = tensor_parallel, context_parallel
        return Sharded(accelerator, student, *groups, cpu_offload=cpu_offload)
    return Replicated(accelerator, student)


def _mesh_of_groups(accelerator: Accelerator, size: int, name: str) -> DeviceMesh:
    """Collective. Return a mesh of processes in which each row is a group.

    A group has `size` processes with adjacent ranks. `name`: the name of the second dimension.
    """
    shape = (accelerator.num_processes // size, size)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("data", name))


def _is_divided(weight: Tensor) -> bool:
    """Return True if the processes of a group have different parts of `weight`, not copies."""
    assert isinstance(weight, DTensor)
    return weight.device_mesh.ndim == 2 and weight.placements[-1] != Replicate()
