"""The rollout engine of a job: connected once per attempt, used by the methods that sample."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import EngineRollouts
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.order import SamplingSettings
from student_trainer.teachers.rollouts_ahead import RolloutsAhead
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
class Engine:
    """The rollout services of a job, and the versions of the weights that they load."""

    client: EngineClient
    accelerator: Accelerator
    snapshots: Snapshots

    def rollouts_ahead(
        self, config: OnPolicyJob | RLJob, teacher: TeacherSource, settings: SamplingSettings
    ) -> RolloutsAhead:
        """Return the training rollouts of a job. `teacher`: scores them."""
        return RolloutsAhead(
            self.accelerator,
            self.client,
            self.snapshots,
            teacher,
            settings,
            lag=config.rollouts.lag,
            last_step=config.max_steps,
        )

    def rollouts(self, settings: SamplingSettings) -> EngineRollouts:
        """Return rollouts with the weights that were published last, for evaluations."""
        return EngineRollouts(self.client, settings, lambda: self.snapshots.newest)


def connect_engine(
    config: AnyTraining,
    service: RolloutServices | None,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    run: Path,
    attempt: int,
    tokenizer: Any,
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
    service.when_lost(client.fail)
    vocab_size = student.trained.model.config.get_text_config().vocab_size
    raise_on_all_ranks(accelerator, lambda: _check(client, rollouts, vocab_size))
    model = student.trained.model
    # transformers casts as it computes, so it needs the weights that learn.
    narrow = rollouts.engine == "vllm" and student.trained.bf16
    dtype = torch.bfloat16 if narrow else torch.float32
    # Those of `lag` steps, of the newest one and of the one that is written; and of an anchor.
    needed = (rollouts.lag + 3) * bytes_of(model, dtype)
    root = Path()  # the main process chooses
    if accelerator.is_main_process:
        root = snapshot_root(run, attempt, needed, local=rollouts.address is None)
    snapshots = Snapshots(
        accelerator,
        student,
        root,
        lineage=f"{run.name}-{attempt}",
        dtype=dtype,
        in_flight=rollouts.in_flight,
        probe_ids=_probe_ids(tokenizer, vocab_size),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
    return Engine(client, accelerator, snapshots)


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


def _probe_ids(tokenizer: Any, vocab_size: int) -> Tensor:
    """Return token ids [n, T] int64 of a probe: of a text, or the first ids if it has too few."""
    wanted = _PROBE_SEQUENCES * _PROBE_TOKENS
    text = tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids
    ids = [*text, *range(min(vocab_size, wanted))][:wanted]
    repeated = (ids * wanted)[:wanted]
    return torch.tensor(repeated).reshape(_PROBE_SEQUENCES, _PROBE_TOKENS)
