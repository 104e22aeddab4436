"""Opens the stores of an offline job for reading. Does not import torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clients.config.offline import OfflineJob
from clients.store.captured_store import CapturedStore, captured_store_of
from clients.store.dataset import LogitDataset
from protos.errors import DistillError, InvalidInput, WrongState

if TYPE_CHECKING:
    from student_trainer.data.order import Indices  # which imports torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingStore(CapturedStore):
    """A captured store that is open for reading. `data`: its sequences and rows."""

    data: LogitDataset

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return int(self.data.lengths.max())

    @property
    def identity(self) -> str:
        """SHA-256 of the checksums of all shards, which identifies the content of the store."""
        digests = "".join(facts.sha256 for facts in self.data.facts)
        return hashlib.sha256(digests.encode()).hexdigest()


@dataclass(frozen=True)
class Stores:
    """The stores of a job: `training`, and `held_out` if `data.eval_path` names one."""

    training: TrainingStore
    held_out: TrainingStore | None


def open_stores(config: OfflineJob) -> Stores:
    """Open the stores of a job.

    Raises a DistillError with the job key if a store cannot be read or does not fit the job.
    """
    training, held_out = captured_store_of(config)
    return Stores(_open_store(training), None if held_out is None else _open_store(held_out))


def remove_copies(
    training: TrainingStore,
    training_indices: Indices,
    held_out: TrainingStore,
    held_out_indices: Indices,
) -> Indices:
    """Return `training_indices` without sequences that also occur in the held-out data.

    `training_indices`, `held_out_indices`: indices of sequences in `training` and in
    `held_out`. A sequence is a copy if its token ids and images are equal. Copies are common in
    data sets. Raises InvalidInput if no sequence is left.
    """
    held_out_contents = {held_out.data.content(int(index)) for index in held_out_indices}
    has_held_out_length = np.isin(
        training.data.lengths[training_indices], held_out.data.lengths[held_out_indices]
    )
    copies = [
        position
        for position in np.flatnonzero(has_held_out_length)
        if training.data.content(int(training_indices[position])) in held_out_contents
    ]
    if len(copies) == len(training_indices):
        raise InvalidInput(
            f"every sequence of the {training.label} is held out too, so no training data is left",
            field=held_out.field,
            hint=f"set eval.prompts below {len(held_out_indices)}, or give other held-out data",
        )
    if copies:
        log.warning("left out %d sequences that are copies of held-out ones", len(copies))
    return np.delete(training_indices, copies)


def _open_store(captured: CapturedStore) -> TrainingStore:
    try:
        data = LogitDataset(captured.path)
    except DistillError as error:
        error.field = captured.field
        raise
    return TrainingStore(**vars(captured), data=data)


def check_same_store(store: TrainingStore, checkpoint_facts: Mapping[str, str]) -> None:
    """Check that a resumed run reads the store that it started with.

    `checkpoint_facts`: the facts that the checkpoint saved about its run. Raises WrongState if the
    identity of the store differs.
    """
    if checkpoint_facts.get("store", store.identity) != store.identity:
        raise WrongState(
            f"the {store.label} is not the store that this run started with",
            field=store.field,
            hint="restore the original store, or submit a new job",
        )
