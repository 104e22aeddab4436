"""Collectives over all processes: maxima, shared errors, and the time limit.

If one process stops while the others are in a collective, the others wait until the limit of
`time_limit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
)

from clients.config.kinds import AnyTraining
from protos.errors import DistillError, error_of
from protos.rpc.transport import address_towards

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_START_SECONDS = 600.0
_BYTES_PER_WEIGHT = 24  # float32: the model, AdamW's moments and an anchor, some of them read twice
_BYTES_PER_SECOND = 50e6
_TOKENS_PER_SECOND = 50.0


def select_interface() -> None:
    """Set the network interface of gloo: the one that leads to the machine of the first process.

    By default, gloo announces the address that belongs to the host name of this machine. This is
    often the loopback address (/etc/hosts of Debian), which other machines cannot reach. The
    function does nothing if all processes are on one machine, or if $GLOO_SOCKET_IFNAME is already
    set. Call it before the process group is formed.
    """
    environment = os.environ
    if _GLOO_INTERFACE in environment or "MASTER_ADDR" not in environment:
        return
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return
    own_address = address_towards(environment["MASTER_ADDR"])
    for name, addresses in psutil.net_if_addrs().items():
        if own_address in (address.address.partition("%")[0] for address in addresses):
            environment[_GLOO_INTERFACE] = name


def is_lost_process_error(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process or the network failed.

    NCCL and the store raise DistError. gloo raises a RuntimeError whose text contains "gloo".
    """
    return isinstance(error, DistError) or "gloo" in str(error).lower()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether `error` means that the GPU or the host has too little memory for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


_ERROR_BYTES = 4096  # size of the message that sends an error to the other processes
Shared = TypeVar("Shared")


def make_accelerator(limit: timedelta, *, cpu_offload: bool = False) -> Accelerator:
    """Collective. Return the Accelerator of this process. It uses a GPU if there is one.

    - limit: the time after which a collective fails.
    - cpu_offload: collectives also accept tensors in host memory. A process without a launcher then
      forms a process group of one process, because FSDP2 needs a group.

    On a GPU, products of float32 matrices may use TF32.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    select_interface()
    timeout = InitProcessGroupKwargs(timeout=limit)
    cuda = torch.cuda.is_available()
    if cpu_offload and not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        group_of_one: dict[str, Any] = {}
        if "RANK" not in os.environ:
            group_of_one = {"store": HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group(backend, timeout=limit, **group_of_one)
    return Accelerator(cpu=not cuda, kwargs_handlers=[timeout])


def max_over_ranks(accelerator: Accelerator, number: int) -> int:
    """Collective. Return the largest `number` that any process passes."""
    if accelerator.num_processes == 1:
        return number
    own_number = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(own_number).max())


def raise_on_all_ranks(accelerator: Accelerator, work: Callable[[], Shared]) -> Shared:
    """Collective. Return the result of `work`. A DistillError on any rank is raised on all ranks.

    No rank therefore waits in a later collective for a rank that has failed. If `work` raised a
    DistillError on this rank, this rank raises that error. Otherwise this rank raises the error of
    the lowest rank that has one; all texts of that error together are cut to 4096 bytes. Other
    exceptions are not shared, so `work` must catch or convert them.
    """
    own_error: DistillError | None = None
    try:
        work_result = work()
    except DistillError as caught:
        own_error = caught
    if not max_over_ranks(accelerator, int(own_error is not None)):
        return work_result
    shared_error = (
        _share_first_error(accelerator, own_error) if accelerator.num_processes > 1 else None
    )
    error_to_raise = own_error or shared_error
    assert error_to_raise is not None
    raise error_to_raise


def _share_first_error(accelerator: Accelerator, own_error: DistillError | None) -> DistillError:
    """Collective. Return the error of the lowest rank that has an error."""
    parts = (
        ()
        if own_error is None
        else (own_error.code, own_error.field, own_error.hint, own_error.message)
    )
    text = "\0".join(parts).encode()[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
    own_bytes = torch.tensor(list(text), dtype=torch.uint8, device=accelerator.device)
    all_bytes = accelerator.gather(own_bytes).reshape(-1, _ERROR_BYTES)
    error_bytes = next(line for line in all_bytes.cpu() if line.any())
    code, field, hint, message = (
        bytes(error_bytes.tolist()).decode("utf-8", "ignore").split("\0", 3)
    )
    return error_of(code, message.rstrip("\0"), field=field, hint=hint)


def time_limit(config: AnyTraining, weights: int) -> timedelta:
    """Return the time after which a collective fails: how long processes wait for the slowest one.

    A dead process is noticed at once; the limit is for a process that hangs. The limit must be
    longer than the work that one process may do while the others already wait. It is the sum of:

        600 s                        start, load of a busy machine
        + teacher.patience_seconds   no answer of the teacher
        + 4 * environment.max_turns * environment.timeout_seconds
                                     no answer of the retriever, asked up to four times
        + rollouts.patience_seconds  no answer of the rollout engine
        + 24 B * weights / 50 MB/s   reading, verifying and writing a checkpoint
        + tokens / 50 per second     sampling all tokens of this process's answers
        + rewards                    this process's answers, one after the other, each scored for as
                                     long as `reward.timeout_seconds` allows

    `weights`: the number of the student's weights.
    """
    answers = max(config.sequences_per_step, config.answers_per_evaluation) / config.processes
    seconds = _START_SECONDS + _BYTES_PER_WEIGHT * weights / _BYTES_PER_SECOND
    seconds += answers * config.method.max_new_tokens / _TOKENS_PER_SECOND
    if config.search is not None:
        seconds += 4 * config.search.max_turns * config.search.timeout_seconds
    if config.teacher_link is not None:
        seconds += config.teacher_link.patience_seconds
    if config.rollout_engine is not None:
        seconds += config.rollout_engine.patience_seconds
    if config.reward_table is not None:
        seconds += answers * config.reward_table.timeout_seconds
    return timedelta(seconds=seconds)
