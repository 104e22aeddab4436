"""The part of the vllm rollout engine that runs inside vLLM's worker processes.

This part replaces vLLM's sampler, and loads snapshots of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from protos.rpc.failpoints import failpoint
from protos.vllm_processes import die_with
from student_trainer.rollout_client.snapshot import Snapshot
from student_trainer.rollout_service.engines.vllm_orders import WorkerOrders
from student_trainer.rollout_service.engines.vllm_wire import ADAPTERS
from student_trainer.rollouts.sample_step import sample_step

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

# Settings for which vLLM measures the memory of a sampling step.
_TRIAL_TOP_K = 64
_TRIAL_DRAWS = 8


class RolloutWorker(_Worker):  # type: ignore[misc]
    """vLLM's worker for this platform. It uses this package's sampler, and loads snapshots."""

    def load_model(self, **options: Any) -> None:
        """Build the model as vLLM does, and replace its sampler.

        Also start a thread that ends this process when the process of the rollout service ends.
        """
        die_with(self.vllm_config.additional_config["service_pid"])
        # vLLM would warn at each load of layers that have no weights of their own.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        super().load_model(**options)
        self._orders = WorkerOrders()
        self.model_runner.sampler = OrderSampler(self.model_runner, self._orders)

    def load_snapshot(self, directory: str, number: int, files: Sequence[str]) -> None:
        """Replace all weights, or all adapters, by those of a snapshot.

        - directory: the directory of the snapshot.
        - number: the number of the version.
        - files: the names of the files to load.

        No sequence may be scheduled during the load. After an error, the model must not be used.
        """
        snapshot = Snapshot(Path(directory), number, "", dict.fromkeys(files, ""))
        if self.lora_config is not None:
            self._replace_adapters(snapshot)
        else:
            self._replace_weights(snapshot.tensors())
        failpoint("weights-replaced")
        self._orders.version = number

    def _replace_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            failpoint("weights-dropped")
            try:
                loaded_names = model.load_weights(weights)
            finally:  # also if only some weights were loaded: the next load starts again
                finalize_layerwise_reload(model, self.model_config)
        _repack_heads(model)
        missing = {name for name, _ in model.named_parameters()} - set(loaded_names)
        if missing:
            raise ValueError(f"there are no weights for {', '.join(sorted(missing))}")

    def _replace_adapters(self, snapshot: Snapshot) -> None:
        self.remove_lora(ADAPTERS)
        self.add_lora(LoRARequest("student", ADAPTERS, str(snapshot.directory)))
        # vLLM silently skips an adapter whose name matches no layer. The first factor of an adapter
        # is never zero, so a nonzero factor shows that an adapter was loaded.
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(ADAPTERS)
        adapter_count = sum(
            bool(factor[slot].any())
            for layer in manager.modules.values()
            for factor in layer.lora_a_stacked
        )
        expected_count = sum(".lora_A." in name for name in snapshot.shapes())
        if adapter_count != expected_count:
            raise ValueError(f"vLLM has taken {adapter_count} of {expected_count} adapters")

    def take_records(self, name: str, index_lengths: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the records that `WorkerOrders.take` returns; [] on ranks other than 0."""
        return self._orders.take(name, index_lengths) if self.rank == 0 else []

    def started_sequences(self, name: str) -> list[int]:
        """Return the indices of the sequences of an order that vLLM has started."""
        return self._orders.started_indices(name)

    def drop_order(self, name: str) -> None:
        """Delete an order; see `WorkerOrders.drop`."""
        self._orders.drop(name)


class OrderSampler(Sampler):  # type: ignore[misc]
    """Replaces vLLM's sampler. With tensor parallelism, rank 0 samples for all ranks."""

    def __init__(self, runner: Any, orders: WorkerOrders) -> None:
        super().__init__()
        self._runner = runner
        self._orders = orders

    def forward(self, logits: Tensor, *_: Any, **__: Any) -> SamplerOutput:
        """Return one token per row of logits [B, V], without log-probs."""
        if logits.dtype != torch.float32:
            raise ValueError(f"vLLM gives logits in {logits.dtype}, not in float32")
        batch = self._runner.input_batch
        count = batch.num_reqs
        if count != len(logits):  # vLLM measures memory with a batch that has no requests
            ids = _sample_trial(logits)
        elif get_tp_group().rank_in_group == 0:
            # The length of each sequence after this step; its new token comes next.
            lengths = self._runner.optimistic_seq_lens_cpu[:count].numpy()
            positions = lengths.astype("int64") - batch.num_prompt_tokens[:count]
            is_due = ~self._runner.discard_request_mask.np[:count]
            ids = self._orders.sample(logits, batch.req_ids, self._fields_of, positions, is_due)
        else:
            ids = torch.zeros(count, dtype=torch.long, device=logits.device)
        ids = get_tp_group().broadcast(ids)
        return SamplerOutput(sampled_token_ids=ids.int()[:, None], logprobs_tensors=None)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return the log-probs of prompt tokens. Requests for the probe need them.

        The rank of each token in the vocabulary is returned as 0. vLLM's own method computes it,
        but compiles a kernel for this, which takes 10 s on a CPU.
        """
        assert num_logprobs == 0
        ids = token_ids[:, None]
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(ids.int(), logprobs.gather(1, ids), ranks)

    def _fields_of(self, name: str) -> dict[str, Any] | None:
        fields: dict[str, Any] | None = self._runner.requests[name].sampling_params.extra_args
        return fields


def _sample_trial(logits: Tensor) -> Tensor:
    """Sample rows that belong to no order, during vLLM's trial run that measures memory.

    The trial uses as much memory as a real step.
    """
    uniforms = torch.full((len(logits),), 0.5, dtype=torch.float64, device=logits.device)
    top_k = min(_TRIAL_TOP_K, logits.shape[1])
    return sample_step(
        logits,
        top_k=top_k,
        temperature=1.0,
        uniforms=uniforms,
        draws=_TRIAL_DRAWS,
        draw_uniforms=uniforms,
    ).token_ids


def _repack_heads(model: torch.nn.Module) -> None:
    """Pack the weights of the head again. On a CPU, vLLM computes with a packed copy of them.

    Call this after a load. If the head shares its weights with the embeddings, vLLM loads only the
    embeddings, and the head would silently keep the old weights.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
