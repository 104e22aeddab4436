"""Compares the stores of an offline job with the job. Reads only the manifests of the stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clients.config.offline import OfflineConfig, OfflineJob
from clients.config.tables.job import JobConfig
from clients.store.copies import manifest_at
from clients.store.manifest import SEQUENCES, Manifest
from protos.errors import DistillError, InvalidInput, WrongState

_FACTS = ("tokenizer_fingerprint", "vocab_size", "top_k", "temperature", "tail_samples")
_NUMERIC_FACTS = ("vocab_size", "top_k", "tail_samples", SEQUENCES)


@dataclass(frozen=True)
class CapturedStore:
    """A complete store of a capture.

    - `path`: path or URL
    - `field`: the key of the job that names the store
    - `facts`: the metadata in its manifest
    - `count`: number of sequences
    """

    path: str
    field: str
    facts: Mapping[str, str]
    count: int  # number of sequences

    @property
    def label(self) -> str:
        """The store's name in error messages."""
        return f"store {self.path}"

    @property
    def top_k(self) -> int:
        """Number of head ids per row; 0 if the rows only have tail samples."""
        return int(self.facts["top_k"])

    @property
    def temperature(self) -> float:
        """Temperature of the teacher's distribution. The student must use the same temperature."""
        return float(self.facts["temperature"])

    @property
    def tail_samples(self) -> int:
        """Number of ids per row that the teacher sampled from its tail; 0: none."""
        return int(self.facts["tail_samples"])

    @property
    def has_samples(self) -> bool:
        """True if the rows have tail samples."""
        return self.tail_samples > 0

    @property
    def has_images(self) -> bool:
        """True if sequences of the store may name images."""
        return "image_column" in self.facts


def captured_stores(config: JobConfig) -> tuple[CapturedStore, CapturedStore | None] | None:
    """Return the training store and the held-out store of an offline job; None for another job.

    The held-out store is None if the job names none. Raises the errors of `captured_store_of`.
    """
    return captured_store_of(config) if isinstance(config, OfflineJob) else None


def captured_store_of(config: OfflineJob) -> tuple[CapturedStore, CapturedStore | None]:
    """Return the training store of a job, and its held-out store or None (see `data.eval_path`).

    Each error names the key of the job. Raises:

    - NotFound: there is no store
    - InvalidInput: a manifest cannot be read, lists too few sequences, or is not that of a capture
    - Corrupt: a manifest is damaged
    - WrongState: a store is incomplete, or does not match the job
    """
    training = _read_store(config.data.path, "data.path")
    _check_facts(config.method, training)
    _check_images(config, training)
    if config.method.on_policy_fraction:
        _check_prompts(training)
    if config.data.prompts is not None and training.facts.get("form") == "text":
        raise WrongState(
            f"the {training.label} has plain text and no prompts",
            field="data.prompts",
            hint="remove the key",
        )
    if config.data.eval_path is None:
        _check_count(config, training, training.count - 1)
        return training, None
    held_out = _read_store(config.data.eval_path, "data.eval_path")
    _check_images(config, held_out)
    for name in ("teacher_fingerprint", *_FACTS):
        if held_out.facts[name] != training.facts[name]:
            raise WrongState(
                f"{name} is {held_out.facts[name]} in the {held_out.label}, but"
                f" {training.facts[name]} in the {training.label}",
                field="data.eval_path",
                hint="capture both stores with the same teacher and settings",
            )
    _check_count(config, held_out, held_out.count)
    return training, held_out


def _read_store(path: str, field: str) -> CapturedStore:
    try:
        manifest = manifest_at(path)
    except DistillError as error:
        error.field = field
        raise
    except OSError as error:
        raise InvalidInput(
            f"cannot read the store {path}: {error.strerror}",
            field=field,
            hint="check the permissions of the directory",
        ) from error
    facts = manifest.metadata
    if not _is_captured(manifest):
        raise InvalidInput(
            f"{path} was not written by distill capture",
            field=field,
            hint="give the store that distill capture wrote",
        )
    count = sum(shard.count for shard in manifest.shards)
    if count != int(facts[SEQUENCES]):
        raise WrongState(
            f"{path} has {count} of {facts[SEQUENCES]} sequences",
            field=field,
            hint="run the same capture again to complete the store",
        )
    if not count:
        raise InvalidInput(
            f"{path} has no sequences",
            field=field,
            hint="give a store with data; distill store info lists the records left out",
        )
    return CapturedStore(path, field, facts, count)


def _is_captured(manifest: Manifest) -> bool:
    """Return whether the metadata have all keys of a capture, and valid numbers."""
    facts = manifest.metadata
    if not {*_FACTS, SEQUENCES, "teacher_fingerprint"} <= facts.keys():
        return False
    try:
        for name in _NUMERIC_FACTS:
            int(facts[name])
        float(facts["temperature"])
    except (TypeError, ValueError):
        return False
    return all(isinstance(shard.count, int) for shard in manifest.shards)


def _check_count(config: OfflineJob, store: CapturedStore, max_count: int) -> None:
    """Raise InvalidInput if the store has too few sequences to hold out.

    `max_count`: number of sequences of `store` that can be held out. Without `data.eval_path`, the
    job holds out `eval.prompts` sequences. A separate held-out store needs at least one sequence
    per process, and may have fewer than `eval.prompts`.
    """
    required_count = (
        config.eval.prompts if config.data.eval_path is None else config.train.processes
    )
    if required_count > max_count:
        raise InvalidInput(
            f"the {store.label} has {store.count} sequences, too few to hold out {required_count}",
            field=store.field,
            hint=f"set eval.prompts to at most {max_count}"
            if config.data.eval_path is None and max_count
            else f"give a store of at least {required_count + store.count - max_count} sequences",
        )


def _check_facts(method: OfflineConfig, store: CapturedStore) -> None:
    """Raise WrongState if keys of the job contradict the metadata of the store."""
    values_by_key = {
        "top_k": (method.top_k, store.top_k),
        "temperature": (method.temperature, store.temperature),
        "teacher_fingerprint": (method.teacher_fingerprint, store.facts["teacher_fingerprint"]),
    }
    for name, (job_value, store_value) in values_by_key.items():
        if job_value is not None and job_value != store_value:
            raise WrongState(
                f"the job sets {job_value}, but the {store.label} was captured with {store_value}",
                field=f"method.{name}",
                hint="remove the key to use the store's value, or give another store",
            )
    if method.tail == "bucket+teacher_samples" and not store.has_samples:
        raise WrongState(
            f"the {store.label} has no tail samples",
            field="method.tail",
            hint="capture with method.tail_samples, or set method.tail to bucket",
        )
    if method.tail == "none" and not store.top_k:
        raise WrongState(
            f"the rows of the {store.label} have no head, so without a tail there is no loss",
            field="method.tail",
            hint="remove the key, or set method.tail to bucket",
        )


def _check_images(config: OfflineJob, store: CapturedStore) -> None:
    """Raise InvalidInput if the store has images, and a key of the job excludes images."""
    rules = [
        (config.train.sharding == "none", "train.sharding"),
        (not config.student.compile, "student.compile"),
        (config.method.on_policy_fraction == 0, "method.on_policy_fraction"),
        (config.data.tokenizer == "same", "data.tokenizer"),
    ]
    for is_compatible, key in rules if store.has_images else ():
        if not is_compatible:
            raise InvalidInput(
                f"the prompts of the {store.label} have images, which this key does not support",
                field=key,
                hint="remove the key, or give a store without images",
            )


def _check_prompts(store: CapturedStore) -> None:
    if store.facts.get("form") == "text" or not store.top_k:
        content = "plain text and no prompts" if store.top_k else "rows without a head"
        raise WrongState(
            f"on-policy sequences need prompts and a head, but the {store.label} has {content}",
            field="method.on_policy_fraction",
            hint="remove the key, or capture prompts and answers with top_k of at least 1",
        )
