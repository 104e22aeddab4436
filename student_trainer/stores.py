"""The stores of an offline job: opened and held against the job. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clients.capture_facts import SEQUENCES
from clients.logit_dataset import LogitDataset
from clients.offline_config import OfflineConfig, OfflineJob
from protos.errors import DistillError, InvalidInput, WrongState

log = logging.getLogger(__name__)

_FACTS = ("tokenizer_fingerprint", "vocab_size", "top_k", "temperature", "tail_samples")


@dataclass(frozen=True)
class Store:
    """What a capture made, complete. `label` is what people are told."""

    data: LogitDataset
    field: str

    @property
    def facts(self) -> Mapping[str, str]:
        return self.data.metadata

    @property
    def label(self) -> str:
        return f"store {self.data.path}"

    @property
    def top_k(self) -> int:
        return int(self.facts["top_k"])

    @property
    def temperature(self) -> float:
        return float(self.facts["temperature"])

    @property
    def has_samples(self) -> bool:
        return int(self.facts["tail_samples"]) > 0

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
    training = _open(config.data.path, "data.path")
    _check_facts(config.method, training)
    if config.method.on_policy_fraction:
        _check_prompts(training)
    if config.data.eval_path is None:
        _check_count(config, training, len(training.data) - 1)
        return Stores(training, None)
    held_out = _open(config.data.eval_path, "data.eval_path")
    for name in ("teacher_fingerprint", *_FACTS):
        if held_out.facts[name] != training.facts[name]:
            raise WrongState(
                f"{name} is {held_out.facts[name]} in the {held_out.label}, and"
                f" {training.facts[name]} in the {training.label}",
                field="data.eval_path",
                hint="capture both in the same way",
            )
    _check_count(config, held_out, len(held_out.data))
    return Stores(training, held_out)


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


def _open(path: str, field: str) -> Store:
    try:
        data = LogitDataset(Path(path))
    except DistillError as error:
        error.field = field
        raise
    if not {*_FACTS, SEQUENCES, "teacher_fingerprint"} <= data.metadata.keys():
        raise InvalidInput(
            f"{path} has rows, but no capture made it",
            field=field,
            hint="give the directory that distill capture wrote",
        )
    if len(data) != int(data.metadata[SEQUENCES]):
        raise WrongState(
            f"{path} has {len(data)} of {data.metadata[SEQUENCES]} sequences",
            field=field,
            hint="let its capture end first; run it again to go on",
        )
    if not len(data):
        raise InvalidInput(f"{path} has no sequences", field=field, hint="capture some")
    return Store(data, field)


def _check_count(config: OfflineJob, store: Store, most: int) -> None:
    """Refuse more held-out sequences than `most`, where they are to be taken from `store`; another
    one may have fewer, but some for each process.
    """
    asked = config.eval.prompts if config.data.eval_path is None else config.train.processes
    if asked > most:
        raise InvalidInput(
            f"{len(store.data)} sequences are too few to hold {asked} of them out",
            field=store.field,
            hint="give more, or lower eval.prompts",
        )


def _check_facts(method: OfflineConfig, store: Store) -> None:
    """Refuse a store of other facts than the job says."""
    said = {
        "top_k": (method.top_k, store.top_k),
        "temperature": (method.temperature, store.temperature),
        "teacher_fingerprint": (method.teacher_fingerprint, store.facts["teacher_fingerprint"]),
    }
    for name, (asked, found) in said.items():
        if asked is not None and asked != found:
            raise WrongState(
                f"the job says {asked}, the {store.label} was captured with {found}",
                field=f"method.{name}",
                hint="leave the key out to use what is stored, or give another store",
            )
    if method.tail == "bucket+teacher_samples" and not store.has_samples:
        raise WrongState(
            f"the {store.label} has no samples of the teacher",
            field="method.tail",
            hint="capture with method.tail_samples, or use the tail bucket",
        )
    if method.tail == "none" and not store.top_k:
        raise WrongState(
            f"the rows of the {store.label} have no head, so without a tail there is no loss",
            field="method.tail",
            hint="leave the key out",
        )


def _check_prompts(store: Store) -> None:
    if store.facts.get("form") == "text" or not store.top_k:
        what = "plain text, no prompts" if store.top_k else "rows without a head"
        raise WrongState(
            f"the {store.label} has {what}, so the student has nothing to answer",
            field="method.on_policy_fraction",
            hint="leave the key out, or give a store of prompts and answers with top_k",
        )


def check_same_store(store: Store, began_with: Mapping[str, str]) -> None:
    """Refuse to go on with another store than the one that the checkpoint learned from."""
    if began_with.get("store", store.identity) != store.identity:
        raise WrongState(
            f"the {store.label} is not the one that this run began with",
            field=store.field,
            hint="put the old one back, or submit the job anew",
        )
