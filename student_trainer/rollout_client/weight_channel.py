"""Transfers the student's weights to the rollout engines: the interface, and a channel of files.

`FileChannel` is the only channel. Engines open its files with `snapshot.py`. Every channel has
these properties, which tests/student_trainer/rollout_service/test_weight_channel.py checks:

- An engine samples an order with the verified weights of the order's version, or the order fails.
- Trainers that share engines never wait for each other, for any order and any names of the engines.
- A trainer that is stopped or killed at any point of `publish` delays no other trainer.
- An engine that was restarted, or has moved to another machine, can load every version that an
  order may still name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from clients.runs.directory import RunDirectory
from clients.runs.file_system import delete_abandoned, has_room, locked_directory
from protos.errors import Unavailable
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints.export import write_adapters, write_weights
from student_trainer.data.sequence import TokenSequence
from student_trainer.model.lora import trainable_weights
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.passes import run_passes_over_rollouts
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.order import InFlight, WeightsVersion
from student_trainer.rollout_client.snapshot import Probe, seal

_IN_RUN = "weights"


class WeightChannel(Protocol):
    """Transfers versions of the student's weights to the engines.

    Every process of a job has an instance.
    """

    @property
    def newest(self) -> WeightsVersion:
        """The version that was published last. At least one version must be published."""

    def publish(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Collective. Make the current weights available as version `number`, and return it.

        `anchor`: True if the student currently has the weights of the anchor. The versions of the
        anchor are a separate lineage. A version that exists is not published again. If the weights
        cannot be published, Unavailable is raised on all ranks.
        """

    def delete_before(self, number: int) -> None:
        """Delete the versions before `number`. No order may name them any more."""

    def close(self) -> None:
        """Delete all versions. Not collective."""


def choose_snapshot_root(run: Path, attempt: int, needed_bytes: int, *, local: bool) -> Path:
    """Return a directory for the snapshots of an attempt: in memory, or in the run directory.

    - needed_bytes: the size of all snapshots that exist at the same time.
    - local: True if the engines run on this machine.

    The function also deletes snapshots that killed trainers left in the memory of this machine, and
    snapshots of earlier attempts in the run directory.
    """
    in_run = RunDirectory(run).weights
    shutil.rmtree(in_run, ignore_errors=True)
    delete_abandoned()
    root = in_run / f"attempt-{attempt}"
    if not local or not has_room(needed_bytes):
        return root
    return locked_directory() or root


def snapshot_bytes(model: Any, dtype: torch.dtype, *, adapters: bool) -> int:
    """Return the size in bytes of a snapshot: of all weights in `dtype`, or of float32 adapters."""
    if adapters:
        return sum(weight.numel() for weight in trainable_weights(model).values()) * 4
    return int(model.num_parameters()) * dtype.itemsize


class FileChannel:
    """A weight channel of files: the main process writes the snapshots of one attempt.

    A snapshot has a probe: a few sequences with the log-probs of the trainer's forward pass. An
    engine that has loaded wrong or incomplete weights computes other log-probs, so the error is
    detected.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        student: Replicated | Sharded,
        root: Path,
        *,
        job: str,
        attempt: int,
        dtype: torch.dtype,
        adapters: bool,
        in_flight: InFlight,
        probe_ids: Tensor,
        tokens_per_micro_batch: int,
    ) -> None:
        """Collective. Set up the writer.

        - root: the directory for the snapshots. It is created, and `close` deletes it.
        - job, attempt, in_flight: see `WeightsVersion`.
        - dtype: the dtype of the stored weights.
        - adapters: True if snapshots contain only the student's adapters.
        - probe_ids [n, T] int64: the sequences of the probe, the same in every process.

        All ranks use the `root` and the `job` of the main process.
        """
        self._accelerator = accelerator
        self._student = student
        [name, self._job] = broadcast_object_list([str(root), job])
        self._root = Path(name)
        self._attempt = attempt
        self._dtype = dtype
        self._adapters = adapters
        self._in_flight: InFlight = in_flight
        self._probe_ids = probe_ids
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._versions: list[WeightsVersion] = []

    @property
    def newest(self) -> WeightsVersion:
        """The version that was written last; see `WeightChannel.newest`."""
        return self._versions[-1]

    def publish(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Collective. Write the current weights; see `WeightChannel.publish`.

        Returns when the snapshot is complete. If the disk is full or fails, the snapshot's files
        are deleted and Unavailable is raised on all ranks.
        """
        version = self._version(number, anchor=anchor)
        if version not in self._versions:
            if anchor:  # an evaluation has ended when the next one begins
                self._delete(
                    [
                        written_version
                        for written_version in self._versions
                        if written_version.lineage == version.lineage
                    ]
                )
            self._write(version)
        self._versions = [
            *(written_version for written_version in self._versions if written_version != version),
            version,
        ]
        return version

    def _version(self, number: int, *, anchor: bool) -> WeightsVersion:
        kind = "anchor" if anchor else "version"
        return WeightsVersion(
            f"{self._job}-{self._attempt}{'-anchor' if anchor else ''}",
            number,
            self._root / f"{kind}-{number:06d}",
            self._in_flight,
            self._job,
            self._attempt,
        )

    def _write(self, version: WeightsVersion) -> None:
        main = self._accelerator.is_main_process
        raise_on_all_ranks(
            self._accelerator, self._directory_creator(version) if main else lambda: None
        )
        probe = Probe(self._probe_ids, self._probe_logprobs())
        dtype = "bfloat16" if self._student.trained.bf16 else "float32"
        model = self._student.trained.model
        weights = model.state_dict(keep_vars=True)
        path = version.directory if main else None

        def write() -> None:
            if self._adapters:
                write_adapters(
                    path, model, {name: weights[name] for name in trainable_weights(model)}
                )
            else:
                write_weights(path, model, weights, self._dtype)
            failpoint("snapshot-weights-written")
            if main:
                seal(version.directory, number=version.number, dtype=dtype, probe=probe)

        # Afterwards the snapshot is complete for every rank.
        raise_on_all_ranks(
            self._accelerator, lambda: _write_or_raise_unavailable(version.directory, write)
        )

    def delete_before(self, number: int) -> None:
        """Delete the versions before `number`."""
        self._delete([version for version in self._versions if version.number < number])

    def _delete(self, old_versions: Sequence[WeightsVersion]) -> None:
        self._versions = [version for version in self._versions if version not in old_versions]
        if self._accelerator.is_main_process:
            for version in old_versions:
                shutil.rmtree(version.directory, ignore_errors=True)

    def close(self) -> None:
        """Delete all snapshots. Not collective."""
        if self._accelerator.is_main_process:
            shutil.rmtree(self._root, ignore_errors=True)
            with suppress(OSError):  # the directory is not empty
                if self._root.parent.name == _IN_RUN:
                    self._root.parent.rmdir()

    def _directory_creator(self, version: WeightsVersion) -> Callable[[], None]:
        def create_directory() -> None:
            needed_bytes = snapshot_bytes(
                self._student.trained.model, self._dtype, adapters=self._adapters
            )
            _write_or_raise_unavailable(
                version.directory, lambda: version.directory.mkdir(parents=True)
            )
            free_bytes = shutil.disk_usage(version.directory).free
            if free_bytes < needed_bytes:
                shutil.rmtree(version.directory)
                raise Unavailable(
                    f"the weights need {needed_bytes >> 20} MiB, but {version.directory} has"
                    f" {free_bytes >> 20} MiB",
                    hint="free space, or lower rollouts.lag, so that fewer versions are kept",
                )

        return create_directory

    def _probe_logprobs(self) -> Tensor:
        """Collective. Return log-probs [n, T - 1] float32 of the probe, on the CPU."""
        student = self._student
        student.trained.eval()
        logprobs = run_passes_over_rollouts(
            student,
            [TokenSequence(ids, 1) for ids in self._probe_ids],
            # Engines compute log-probs from all logits, even if they sample from a subset.
            lambda batch: student.rows(batch, 1.0, every_id=True)[1].token_logprobs.float().cpu(),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
        )
        return torch.stack(logprobs)


def _write_or_raise_unavailable(directory: Path, write: Callable[[], None]) -> None:
    """Run `write`; after an OSError, delete `directory` and raise Unavailable."""
    try:
        write()
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise Unavailable(
            f"cannot write the weights for the rollout engine to {directory}: {error}",
            field="disk",
            hint="free space, or lower rollouts.lag, so that fewer versions are kept",
        ) from error
