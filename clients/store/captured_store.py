"""The store of a capture as its manifest tells of it: what a job from stored rows is held against
before a row is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clients.config.offline import OfflineConfig, OfflineJob
from clients.store.facts import SEQUENCES
from clients.store.manifest import Manifest, read_manifest
from protos.errors import DistillError, InvalidInput, NotFound, WrongState

_FACTS = ("tokenizer_fingerprint", "vocab_size", "top_k", "temperature", "tail_samples")
_NUMBERS = ("vocab_size", "top_k", "tail_samples", SEQUENCES)


@dataclass(frozen=True)
class CapturedStore:
    """What a capture made, complete. `label` is what people are told, `field` the job's key."""

    path: str
    field: str
    facts: Mapping[str, str]
    count: int  # of sequences

    @property
    def label(self) -> str:
        return f"store {self.path}"

    @property
    def top_k(self) -> int:
        return int(self.facts["top_k"])

    @property
    def temperature(self) -> float:
        return float(self.facts["temperature"])

    @property
    def has_samples(self) -> bool:
        return int(self.facts["tail_samples"]) > 0


def captured_store_of(config: OfflineJob) -> tuple[CapturedStore, CapturedStore | None]:
    """The store to learn from, and the held-out one, if it is another.

    Raises a DistillError for a manifest that cannot be read, or is not what the job asks for.
    """
    training = _read(config.data.path, "data.path")
    _check_facts(config.method, training)
    if config.method.on_policy_fraction:
        _check_prompts(training)
    if config.data.eval_path is None:
        _check_count(config, training, training.count - 1)
        return training, None
    held_out = _read(config.data.eval_path, "data.eval_path")
    for name in ("teacher_fingerprint", *_FACTS):
        if held_out.facts[name] != training.facts[name]:
            raise WrongState(
                f"{name} is {held_out.facts[name]} in the {held_out.label}, and"
                f" {training.facts[name]} in the {training.label}",
                field="data.eval_path",
                hint="capture both in the same way",
            )
    _check_count(config, held_out, held_out.count)
    return training, held_out


def _read(path: str, field: str) -> CapturedStore:
    try:
        manifest = read_manifest(Path(path))
        if manifest is None:
            raise NotFound(f"{path} is not a store of rows", hint="it has no manifest.json")
    except DistillError as error:
        error.field = field
        raise
    except OSError as error:
        raise InvalidInput(
            f"cannot read the store {path}: {error.strerror}", field=field, hint="check its owner"
        ) from error
    facts = manifest.metadata
    if not _is_of_a_capture(manifest):
        raise InvalidInput(
            f"{path} has rows, but no capture made it",
            field=field,
            hint="give the directory that distill capture wrote",
        )
    count = sum(shard.count for shard in manifest.shards)
    if count != int(facts[SEQUENCES]):
        raise WrongState(
            f"{path} has {count} of {facts[SEQUENCES]} sequences",
            field=field,
            hint="let its capture end first; run it again to go on",
        )
    if not count:
        raise InvalidInput(f"{path} has no sequences", field=field, hint="capture some")
    return CapturedStore(path, field, facts, count)


def _is_of_a_capture(manifest: Manifest) -> bool:
    """Whether it says what a capture says, and numbers are numbers."""
    facts = manifest.metadata
    if not {*_FACTS, SEQUENCES, "teacher_fingerprint"} <= facts.keys():
        return False
    try:
        for name in _NUMBERS:
            int(facts[name])
        float(facts["temperature"])
    except (TypeError, ValueError):
        return False
    return all(isinstance(shard.count, int) for shard in manifest.shards)


def _check_count(config: OfflineJob, store: CapturedStore, most: int) -> None:
    """Refuse more held-out sequences than `most`, where they are to be taken from `store`; another
    one may have fewer, but some for each process.
    """
    asked = config.eval.prompts if config.data.eval_path is None else config.train.processes
    if asked > most:
        raise InvalidInput(
            f"{store.count} sequences are too few to hold {asked} of them out",
            field=store.field,
            hint="give more, or lower eval.prompts",
        )


def _check_facts(method: OfflineConfig, store: CapturedStore) -> None:
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


def _check_prompts(store: CapturedStore) -> None:
    if store.facts.get("form") == "text" or not store.top_k:
        what = "plain text, no prompts" if store.top_k else "rows without a head"
        raise WrongState(
            f"the {store.label} has {what}, so the student has nothing to answer",
            field="method.on_policy_fraction",
            hint="leave the key out, or give a store of prompts and answers with top_k",
        )
