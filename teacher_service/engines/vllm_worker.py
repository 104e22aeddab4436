"""The part of the vllm engine that runs inside vLLM's worker processes.

The scoring head takes the place of vLLM's pooler. Hidden states stay on the device; only rows
leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4
from vllm.model_executor.layers.pooler import PoolingParamsUpdate
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import CpuArchEnum, current_platform

from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock, concatenate
from protos.vllm_processes import die_with
from teacher_service.engines.vllm_wire import decode_query, encode_answer, slice_query
from teacher_service.head.head import Head
from teacher_service.head.scale_and_cap import ScaleAndCap
from teacher_service.head.stored_head import StoredWeight, read_tensor, read_weight
from teacher_service.head.vocabulary_shard import VocabularyShard
from teacher_service.models.files import weight_files
from teacher_service.models.load_progress import write_failure, write_share

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

TASK = "token_embed"
_EMPTY = torch.empty(0, dtype=torch.uint8)


class ScoringWorker(_Worker):  # type: ignore[misc]
    """vLLM's worker for this platform, with its part of the head.

    The head is loaded before vLLM measures free memory, so that the memory share includes the head.
    Each of R ranks has V / R rows of the head, and computes the logits of the ids of these rows.
    """

    def load_model(self, **options: Any) -> None:
        """Load the model as vLLM does, report the progress, and replace its pooler by RowPooler.

        Also starts a thread that ends this process when the teacher process ends.
        """
        engine_config = self.vllm_config.additional_config
        die_with(engine_config["teacher_pid"])
        if self.rank == 0:
            _report_share(Path(self.model_config.model), Path(engine_config["progress_file"]))
        if current_platform.is_cpu():
            _refuse_inexact_kernels()
        try:
            super().load_model(**options)
        except Exception as error:
            write_failure(Path(engine_config["progress_file"]), str(error))
            raise
        weight, scales, bias = engine_config["head"]
        head = self._load_head(
            StoredWeight(weight, scales),
            bias,
            ScaleAndCap(*engine_config["scale_and_cap"]),
            _make_shard(engine_config["vocab_size"]),
        )
        # vLLM reads only the output of the first rank of the last stage of a pipeline.
        returns_rows = get_pp_group().is_last_rank and get_tp_group().is_first_rank
        self.model_runner.get_model().pooler = RowPooler(head, returns_rows=returns_rows)

    def _load_head(
        self,
        stored: StoredWeight,
        bias_name: str | None,
        scale_and_cap: ScaleAndCap,
        shard: VocabularyShard | None,
    ) -> Head:
        path, dtype = Path(self.model_config.model), self.model_config.dtype
        ids = None if shard is None else shard.ids
        weight = _pad_rows(read_weight(path, stored, ids).to(self.device, dtype), shard)
        bias = None
        if bias_name is not None:
            bias = _pad_rows(read_tensor(path, bias_name, ids).to(self.device, dtype), shard)
        product = None if weight.is_cuda else cpu_product(weight)
        return Head(weight, bias, product, scale_and_cap, shard)

    def attention_backends(self) -> list[str]:
        """Return the sorted names of the attention backends.

        The names are part of the fingerprint, because a backend decides the last digits of rows.
        """
        backends = get_current_attn_backends(self.vllm_config)
        return sorted(backend.get_name() for backend in backends)

    def steps(self) -> tuple[int, int]:
        """Return (scheduler steps, tokens) computed since the model was loaded."""
        pooler = self.model_runner.get_model().pooler
        return pooler.steps, pooler.tokens


def _make_shard(vocab_size: int) -> VocabularyShard | None:
    """Return the part of the vocabulary of this process; None if it has all ids."""
    group = get_tp_group()
    if group.world_size == 1:
        return None
    return VocabularyShard(vocab_size, group.rank_in_group, group.world_size, group.device_group)


def _pad_rows(rows: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Return `rows` [n, ...] padded with zeros to the shard width, which all ranks share."""
    if shard is None or len(rows) == shard.width:
        return rows
    return torch.cat([rows, rows.new_zeros(shard.width - len(rows), *rows.shape[1:])])


def _refuse_inexact_kernels() -> None:
    """Make vLLM's CPU build reject kernels that would fail or compute wrong rows.

    - Weights of 4 bits: vLLM selects its kernel for them even on a processor with AVX2 alone, whose
      build of vLLM does not contain that kernel. The worker process then dies at the first query.
    - int8 weights and inputs: without VNNI, the median error of the rows of a tiny model was 0.54
      nats; rounding alone causes 0.14 nats.
    - Experts with weights of 4 bits: vLLM rounds the inputs to 8 bits, although the model does not
      specify this rounding.
    """
    CPUExpertsInt4.__init__ = _make_refusal(
        "on a CPU, vLLM rounds the inputs of experts of 4 bits to 8 bits, which this model does not"
        " ask for; use a GPU"
    )
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        CPUWNA16LinearKernel.can_implement = _make_refusal(
            "vLLM computes layers of 4 bits on processors with AVX-512 only; use a GPU"
        )
    x86 = current_platform.get_cpu_architecture() == CpuArchEnum.X86
    if x86 and not torch.cpu._is_vnni_supported():
        CPUInt8ScaledMMLinearKernel.can_implement = _make_refusal(
            "vLLM computes int8 layers exactly on processors with AVX-512 VNNI only; use a GPU"
        )


def _make_refusal(reason: str) -> Callable[..., Any]:
    """Return a replacement for a function of vLLM that raises ValueError(`reason`)."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError(reason)

    return refuse


def cpu_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function states -> states @ weight.T that vLLM uses on this CPU.

    On some CPUs this function is twice as fast as torch.
    """
    layer: Any = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda states: layer.cpu_linear(states, weight, None)


def _report_share(model: Path, file: Path) -> None:
    """Make vLLM's loader write the share of the weights' bytes that it has read into `file`."""
    total = sum(weight_file.stat().st_size for weight_file in weight_files(model))
    get_all_weights = DefaultModelLoader.get_all_weights

    def count_bytes(loader: Any, *args: Any) -> Iterator[tuple[str, Tensor]]:
        read_bytes = 0
        for name, weight in get_all_weights(loader, *args):
            yield name, weight
            read_bytes += weight.nbytes
            write_share(file, min(1.0, read_bytes / total))

    DefaultModelLoader.get_all_weights = count_bytes


class _RequestRows:
    """The rows of a request so far; vLLM computes a long prompt in several steps."""

    def __init__(self, query: ScoreQuery) -> None:
        self.query = query
        self.first = query.start
        self.answer: RowBlock | Corrupt | None = None

    def add(self, first: int, answer: RowBlock | Corrupt) -> None:
        """Add the rows from position `first` on.

        vLLM may preempt a request and compute it again; repeated rows replace earlier rows. The
        first Corrupt is final.
        """
        earlier = self.answer
        if isinstance(answer, Corrupt) or isinstance(earlier, Corrupt):
            self.answer = earlier if isinstance(earlier, Corrupt) else answer
        elif earlier is None or not self.first < first <= self.first + len(earlier):
            self.first, self.answer = first, answer
        else:
            self.answer = concatenate([earlier.slice(0, first - self.first), answer])


class RowPooler(torch.nn.Module):
    """A pooler of vLLM that computes encoded rows from hidden states.

    `returns_rows` is False on ranks whose output vLLM ignores; these ranks also compute their part
    of the rows. `steps` and `tokens` count the computed steps and their tokens.
    """

    def __init__(self, head: Head, *, returns_rows: bool = True) -> None:
        super().__init__()
        self._head = head
        self._returns_rows = returns_rows
        self.steps = self.tokens = 0

    def get_supported_tasks(self) -> set[str]:
        """Return the only pooling task: `token_embed`."""
        return {TASK}

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        """Return no changes: requests keep their pooling parameters."""
        return PoolingParamsUpdate()

    def forward(self, hidden_states: Tensor, pooling_metadata: Any) -> list[Tensor | None]:
        """Score the hidden states [tokens, H] of one scheduler step.

        Returns one entry per request of the step: the encoded result, uint8 [n], if the request
        ends with this step, else None.
        """
        self.steps += 1
        self.tokens += len(hidden_states)
        cursor = pooling_metadata.get_pooling_cursor()
        finished = cursor.get_finished_mask()
        counts = cursor.num_scheduled_tokens_cpu.tolist()
        requests = [
            _get_request_rows(state, params, count)
            for state, params, count in zip(
                pooling_metadata.pooling_states,
                pooling_metadata.pooling_params,
                counts,
                strict=True,
            )
        ]
        chunks = torch.split(hidden_states, counts)
        self._add_rows(requests, chunks, cursor.seq_lens_cpu.tolist())
        if not self._returns_rows:
            return [_EMPTY if ends else None for ends in finished]
        return [
            _encode_request(request) if ends else None
            for request, ends in zip(requests, finished, strict=True)
        ]

    def _add_rows(
        self,
        requests: Sequence[_RequestRows],
        chunks: Sequence[Tensor],
        token_counts: Sequence[int],
    ) -> None:
        """Score each request's chunk of states and add the rows to the request.

        `token_counts` [requests]: the number of tokens up to the last state of each chunk.
        """
        due_requests, parts, states = [], [], []
        for request, chunk, end in zip(requests, chunks, token_counts, strict=True):
            first = max(request.query.start, end - len(chunk) + 1)
            if first <= end:
                due_requests.append(request)
                parts.append(slice_query(request.query, first, end + 1))
                states.append(chunk[len(chunk) - (end + 1 - first) :])
        for request, part, answer in zip(
            due_requests, parts, self._head.score(parts, states), strict=True
        ):
            request.add(part.start, answer)


def _get_request_rows(state: Any, params: Any, count: int) -> _RequestRows:
    if not hasattr(state, "progress"):
        fields = params.extra_kwargs
        # vLLM measures memory with a trial run that carries no query.
        placeholder_ids = np.zeros(count + 1, np.int32)
        state.progress = _RequestRows(
            decode_query(fields) if fields else ScoreQuery(placeholder_ids, 1, top_k=1)
        )
    progress: _RequestRows = state.progress
    return progress


def _encode_request(request: _RequestRows) -> Tensor:
    answer = request.answer
    assert answer is not None, "the last token's state is always computed"
    if isinstance(answer, RowBlock) and request.query.head_ids is not None:
        answer = replace(answer, head_ids=None)
    return encode_answer(answer)
