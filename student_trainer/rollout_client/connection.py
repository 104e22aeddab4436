"""Connects a job to its rollout services. The methods that sample share the connection.

There is one connection per attempt and process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from clients.config.kinds import AnyTraining
from clients.data.tokens.answers import end_ids
from clients.preflight.rollouts import another_engine
from clients.runs.directory import RunDirectory
from clients.runs.identity import run_identity
from protos.errors import WrongState
from protos.rpc.channel import ROLLOUTS_TOKEN
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.engine_client import EngineClient, RolloutServiceInfo
from student_trainer.rollout_client.engine_rollouts import (
    EngineRollouts,
    EngineSearch,
    SingleTurnRollouts,
)
from student_trainer.rollout_client.failed_orders import fail_when_lost
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.order import SamplingSettings, WeightsVersion
from student_trainer.rollout_client.placed_services import PlacedServices
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.rollout_client.weight_channel import (
    FileChannel,
    WeightChannel,
    choose_snapshot_root,
    snapshot_bytes,
)
from student_trainer.rollouts.search import SearchConversations
from student_trainer.teachers.source import TeacherSource

# Sequences of a probe, and tokens of each.
_PROBE_SEQUENCES, _PROBE_TOKENS = 4, 32
_PROBE_TEXT = """\
A farmer has 17 sheep and buys 5 more. How many sheep does he have? He has 17 + 5 = 22 sheep. Water
boils at 100 degrees at sea level, and at less on a mountain. def add(a, b): return a + b. The train
left the station at noon, and nobody on the platform saw where the old man had gone. 12 * 12 = 144,
and half of it is 72. Once upon a time there was a small house at the edge of a large, dark forest.
"""


@dataclass(frozen=True)
class EngineConnection:
    """The rollout services of a job, and the versions of the weights that they load.

    - client: sends orders to the services.
    - channel: publishes the versions of the weights.
    - lag: maximum age in steps of the weights that training rollouts are sampled with.
    - sleeps: True if the services free their GPU memory while the trainer learns.
    - end_ids: the tokens that end a sequence.
    """

    client: EngineClient
    accelerator: Accelerator
    channel: WeightChannel
    lag: int
    sleeps: bool
    end_ids: tuple[int, ...]

    def rollouts_ahead(
        self, config: AnyTraining, teacher: TeacherSource, rollouts: EngineRollouts
    ) -> RolloutsAhead:
        """Return the training rollouts of a job, which are sampled before the steps that use them.

        `teacher`: scores the rollouts.
        """
        return RolloutsAhead(
            self.accelerator,
            self.client,
            self.channel,
            teacher,
            rollouts,
            lag=self.lag,
            last_step=config.max_steps,
            sleeps=self.sleeps,
        )

    def rollouts(
        self, settings: SamplingSettings, conversations: SearchConversations | None = None
    ) -> EngineRollouts:
        """Return rollouts that the engine samples. Evaluations sample with the newest weights.

        `conversations`: the multi-turn conversations of a job with an environment, otherwise None.
        """
        settings = replace(settings, end_ids=self.end_ids)
        if conversations is not None:
            return EngineSearch(self.client, settings, self._newest_version, conversations)
        return SingleTurnRollouts(self.client, settings, self._newest_version)

    def _newest_version(self) -> WeightsVersion:
        return self.channel.newest


def wait_for_shared_gpus(
    config: AnyTraining, service: RolloutServices | PlacedServices | None, accelerator: Accelerator
) -> None:
    """Collective. Wait until engines that share the trainer's GPUs have started.

    vLLM measures the free memory when it starts, so call this before the student is loaded. If a
    service does not start, its error is raised on all ranks.
    """
    if service is None or accelerator.device.type != "cuda":
        return
    if not config.engine_gpus:
        raise_on_all_ranks(accelerator, service.addresses)


def connect_engine(
    config: AnyTraining,
    service: RolloutServices | PlacedServices | None,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    run: Path,
    attempt: int,
    tokenizer: Any,
) -> EngineConnection | None:
    """Collective. Connect every process to the services of the job; None if the job has none.

    Waits until the services that the job has started are ready. If a service does not start or does
    not match the student, its error is raised on all ranks.
    """
    rollouts = config.rollout_engine
    if service is None or rollouts is None:
        return None
    addresses = raise_on_all_ranks(accelerator, service.addresses)
    addresses, token = broadcast_object_list([addresses, service.token])
    if token:
        os.environ[ROLLOUTS_TOKEN] = token
    client = EngineClient(
        addresses, rank=accelerator.process_index, patience_seconds=rollouts.patience_seconds
    )
    lost_file = RunDirectory(run).logs(attempt) / "rollouts-lost.json"
    fail_when_lost(service, client, lost_file, main=accelerator.is_main_process)
    vocab_size = student.trained.model.config.get_text_config().vocab_size
    info = raise_on_all_ranks(
        accelerator, lambda: _check_services(client, config, rollouts.engine, vocab_size)
    )
    adapters = info.lora_rank > 0
    model = student.trained.model
    # transformers casts weights while it computes, so it needs the float32 weights.
    in_bfloat16 = rollouts.engine == "vllm" and student.trained.bf16
    dtype = torch.bfloat16 if in_bfloat16 else torch.float32
    needed_bytes = (rollouts.versions + 1) * snapshot_bytes(
        model, dtype, adapters=adapters
    )  # 1: the version of an anchor
    root, job = Path(), ""  # the main process chooses
    if accelerator.is_main_process:
        job = run_identity(run)
        root = choose_snapshot_root(run, attempt, needed_bytes, local=service.on_one_machine)
    channel = FileChannel(
        accelerator,
        student,
        root,
        job=job,
        attempt=attempt,
        dtype=dtype,
        adapters=adapters,
        in_flight=rollouts.in_flight,
        probe_ids=_probe_ids(tokenizer, vocab_size),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
    sleeps = info.sleeps and not rollouts.lag
    ends = tuple(end for end in end_ids(model.generation_config, tokenizer) if end < vocab_size)
    return EngineConnection(client, accelerator, channel, rollouts.lag, sleeps, ends)


def _check_services(
    client: EngineClient, config: AnyTraining, engine: str, vocab_size: int
) -> RolloutServiceInfo:
    """Check that the services match the job, and return their common properties.

    `vocab_size`: number of the student's logits. Raises WrongState if they do not match.
    """
    info = client.info(vocab_size)
    if info.engine != engine:
        raise another_engine(info.engine, engine)
    job_rank = config.student.adapter_rank
    if info.lora_rank not in (0, job_rank):
        raise WrongState(
            f"the service at rollouts.address accepts adapters of rank {info.lora_rank}, but the"
            f" job has "
            + (f"rank {job_rank}" if job_rank else "no adapters, or also trains the head"),
            field="rollouts.address",
            hint=f"start the service with --lora-rank {job_rank}"
            if job_rank
            else "start the service without --lora-rank",
        )
    return info


def _probe_ids(tokenizer: Any, vocab_size: int) -> Tensor:
    """Return the token ids [n, T] int64 of a probe.

    They are the ids of a text, followed by 0, 1, 2, ... if the text is too short.
    """
    token_count = _PROBE_SEQUENCES * _PROBE_TOKENS
    text = tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids
    ids = [*text, *range(min(vocab_size, token_count))][:token_count]
    repeated_ids = (ids * token_count)[:token_count]
    return torch.tensor(repeated_ids).reshape(_PROBE_SEQUENCES, _PROBE_TOKENS)
