"""The rollout engine of a job: connected once per attempt, used by the methods that sample."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from clients.config.kinds import AnyTraining
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.tables.rollouts import RolloutsConfig
from protos.errors import WrongState
from protos.rpc.channel import ROLLOUTS_TOKEN
from student_trainer.checkpoints.snapshots import Snapshots, bytes_of, snapshot_root
from student_trainer.data.prompts import Prompt
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollouts.engine_client import EngineClient
from student_trainer.rollouts.local_services import RolloutServices
from student_trainer.rollouts.order import SamplingSettings
from student_trainer.teachers.rollouts_ahead import RolloutsAhead
from student_trainer.teachers.source import TeacherSource

# Sequences of a probe, and tokens of each.
_PROBE_SEQUENCES, _PROBE_TOKENS = 4, 32


@dataclass(frozen=True)
class Engine:
    """The rollout services of a job. local: they run on this machine. run: the run directory.

    lineage: of the weights of this attempt.
    """

    client: EngineClient
    accelerator: Accelerator
    student: Replicated | Sharded
    run: Path
    lineage: str
    local: bool

    def rollouts_ahead(
        self,
        config: OnPolicyJob | RLJob,
        teacher: TeacherSource,
        settings: SamplingSettings,
        held_out: Sequence[Prompt],
    ) -> RolloutsAhead:
        """Collective. Return the training rollouts of a job.

        `teacher`: scores them. `held_out`: prompts of all processes, for the probe of the weights.
        """
        model = self.student.trained.model
        # transformers casts as it computes, so it needs the weights that learn.
        narrow = config.rollouts.engine == "vllm" and self.student.trained.bf16
        dtype = torch.bfloat16 if narrow else torch.float32
        versions = config.rollouts.lag + 2
        needed = versions * bytes_of(model, dtype)
        snapshots = Snapshots(
            self.accelerator,
            self.student,
            snapshot_root(self.run, needed, local=self.local),
            lineage=self.lineage,
            dtype=dtype,
            in_flight=config.rollouts.in_flight,
            probe_ids=_probe_ids(held_out),
            tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        )
        return RolloutsAhead(
            self.accelerator,
            self.client,
            snapshots,
            teacher,
            settings,
            lag=config.rollouts.lag,
            last_step=config.max_steps,
        )


def connect_engine(
    config: AnyTraining,
    service: RolloutServices | None,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    run: Path,
    attempt: int,
) -> Engine | None:
    """Collective. Connect every process to the services of the job; None if it has none.

    Waits until the services that the job has started are ready. Raises the error of a service that
    does not start, or that does not fit the student, on all ranks.
    """
    if service is None:
        return None
    rollouts = cast(OnPolicyJob | RLJob, config).rollouts
    found = raise_on_all_ranks(accelerator, service.addresses)
    found, token = broadcast_object_list([found, service.token])
    if token:
        os.environ[ROLLOUTS_TOKEN] = token
    client = EngineClient(
        found, rank=accelerator.process_index, patience_seconds=rollouts.patience_seconds
    )
    vocab_size = student.trained.model.config.get_text_config().vocab_size
    raise_on_all_ranks(accelerator, lambda: _check(client, rollouts, vocab_size))
    return Engine(
        client,
        accelerator,
        student,
        run,
        lineage=f"{run.name}-{attempt}",
        local=rollouts.address is None,
    )


def _check(client: EngineClient, rollouts: RolloutsConfig, vocab_size: int) -> None:
    info = client.info(vocab_size)
    if info.engine != rollouts.engine:
        raise WrongState(
            f"the service at rollouts.address has the engine {info.engine}, the job asks for "
            f"{rollouts.engine}",
            field="rollouts.engine",
            hint=f"set rollouts.engine = '{info.engine}', or start the service with --engine "
            f"{rollouts.engine}",
        )


def _probe_ids(prompts: Sequence[Prompt]) -> Tensor:
    """Return token ids [n, T] int64 of a probe: those of prompts, repeated if they are too few."""
    ids = torch.cat([torch.from_numpy(prompt.ids).long() for prompt in prompts[:64]])
    wanted = _PROBE_SEQUENCES * _PROBE_TOKENS
    return ids.repeat(-(-wanted // len(ids)))[:wanted].reshape(_PROBE_SEQUENCES, _PROBE_TOKENS)
