"""The stores of an offline job, opened. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clients.config.offline import OfflineJob
from clients.store.captured_store import CapturedStore, captured_store_of
from clients.store.dataset import LogitDataset
from protos.errors import DistillError, InvalidInput, WrongState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store(CapturedStore):
    """What a capture made, with its rows."""

    data: LogitDataset

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.data.lengths.max())

    @property
    def identity(self) -> str:
        """Of every byte in it."""
        digests = "".join(facts.sha256 for facts in self.data.facts)
        return hashlib.sha256(digests.encode()).hexdigest()


@dataclass(frozen=True)
class Stores:
    """To learn from, and the held-out one, if it is another."""

    training: Store
    held_out: Store | None


def open_stores(config: OfflineJob) -> Stores:
    """Raises a DistillError for a store that cannot be read, or is not what the job asks for."""
    training, held_out = captured_store_of(config)
    return Stores(_open(training), None if held_out is None else _open(held_out))


def without_copies(
    training: Store, chosen: NDArray[np.int64], held_out: Store, aside: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Those of the `chosen` sequences of `training` whose tokens are not those of one that is held
    out: data says some things twice. Raises InvalidInput where none is left.
    """
    unseen = {held_out.data.token_ids(int(index)) for index in aside}
    alike = np.isin(training.data.lengths[chosen], held_out.data.lengths[aside])
    copies = [
        place
        for place in np.flatnonzero(alike)
        if training.data.token_ids(int(chosen[place])) in unseen
    ]
    if len(copies) == len(chosen):
        raise InvalidInput(
            f"every sequence of the {training.label} is held out too, so none is left to learn",
            field=held_out.field,
            hint="hold out other data, or lower eval.prompts",
        )
    if copies:
        log.warning("%d sequences say what a held-out one says: left out", len(copies))
    return np.delete(chosen, copies)


def _open(captured: CapturedStore) -> Store:
    try:
        data = LogitDataset(Path(captured.path))
    except DistillError as error:
        error.field = captured.field
        raise
    return Store(**vars(captured), data=data)


def check_same_store(store: Store, began_with: Mapping[str, str]) -> None:
    """Refuse to go on with another store than the one that the checkpoint learned from."""
    if began_with.get("store", store.identity) != store.identity:
        raise WrongState(
            f"the {store.label} is not the one that this run began with",
            field=store.field,
            hint="put the old one back, or submit the job anew",
        )
