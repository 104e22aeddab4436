"""Writes checkpoints while training continues. A checkpoint has three phases:

    save      every process copies its part of the tensors to host memory; training waits for this
    write     a thread of every process writes its part, hashes it and syncs it to disk
    publish   the thread of the main process waits for all parts, renames the directory, and then
              deletes older checkpoints

The threads use no collectives. When a thread has written its part, it writes the digests of the
part into a file in the temporary directory. The thread of the main process waits for these files.
`poll` shares the errors of the threads between the steps of training. Saving does not change the
results of the run. At most one checkpoint is written at a time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from protos.errors import DistillError, WrongState
from protos.rpc.failpoints import failpoint
from student_trainer.checkpoints import atomic_directory
from student_trainer.checkpoints.checkpoint import Contents, checkpoint_path, format_state
from student_trainer.checkpoints.tensor_file import PartWriter
from student_trainer.parallel.collectives import max_over_ranks
from student_trainer.parallel.shards import full_tensor, local, rows_of_part

log = logging.getLogger(__name__)

_PAUSE = 0.02  # seconds between two checks of the other threads
_PARTS = "parts"  # directory with one file for each complete part
# Builds this process's files of a checkpoint, by name. Waits until the orders that ran when the
# function was created have ended; returns {} if the event is set first. Runs in another thread.
LaterFiles = Callable[[threading.Event], Mapping[str, bytes]]
# State of the thread of a process; a failure with an errno is _FAILED + errno.
_DONE, _BUSY, _FAILED = 0, 1, 2


class Saver:
    """Writes the checkpoints of a run.

    Every process has an instance, and all processes call its collective methods at the same steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        root: Path,
        *,
        small_files: Mapping[str, bytes],
        facts: Mapping[str, str] | None = None,
        before_publication: Callable[[], None] = lambda: None,
        after_publication: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the settings.

        - root: the directory of all checkpoints.
        - small_files: the files without weights of the model directory, by name.
        - facts: texts by name that every checkpoint stores, see `read_facts`.
        - before_publication, after_publication: functions that the thread of the main process calls
          just before and just after a checkpoint appears.
        """
        self._accelerator = accelerator
        self._root = root
        self._small_files = small_files
        self._facts = facts
        self._before_publication = before_publication
        self._after_publication = after_publication
        self._part, self._parts = accelerator.process_index, accelerator.num_processes
        self._host = _HostMemory(self._part, self._parts)
        self._background_write: _BackgroundWrite | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written. The value is the same in every process."""
        return self._background_write is not None

    def save(
        self,
        step: int,
        contents: Contents,
        metrics: Mapping[str, float] | None = None,
        write_extra_files: LaterFiles | None = None,
    ) -> None:
        """Collective. Copy the state of the run, and start to write it as the checkpoint of `step`.

        First waits until the previous checkpoint is complete.

        - contents: the tensors of the checkpoint.
        - metrics: the metrics of the step; None if metrics.jsonl already has them. See
          `read_metrics`.
        - write_extra_files: returns additional files of this process; the writing thread calls it.

        Raises WrongState if a newer attempt has taken over the run, and OSError. Both are raised on
        all ranks.
        """
        self.finish()
        path = checkpoint_path(self._root, step)
        error: Exception | None = None
        if self._accelerator.is_main_process:
            try:
                partial = atomic_directory.begin(path)
                (partial / "model").mkdir()
                (partial / _PARTS).mkdir()
            except (OSError, DistillError) as failure:
                error = failure
        if (worst_code := self._worst_code(error)) >= _FAILED:
            self._raise_error(error, worst_code, path)
        copies = self._host.copies(contents.tensors)
        failpoint("checkpoint-copied")
        small_contents: dict[str, bytes] = {}
        if self._accelerator.is_main_process:
            small_contents = {f"model/{name}": data for name, data in self._small_files.items()}
            small_contents |= {
                **contents.index,
                "state.json": format_state(step, self._facts, metrics),
            }

        def write(stop: threading.Event) -> None:
            self._write(path, contents, copies, small_contents, write_extra_files, stop)

        self._background_write = _BackgroundWrite(path, write)

    def poll(self) -> bool:
        """Collective. Return True if no checkpoint is being written, without waiting for one.

        If a thread failed, removes the partial files, and raises the error on all ranks.
        """
        if self._background_write is None:
            return True
        background_write = self._background_write
        is_busy = background_write.is_busy  # read before `error`, which the thread sets last
        worst_code = self._worst_code(background_write.error, is_busy=is_busy)
        if worst_code == _BUSY:
            return False
        self._background_write = None
        background_write.stop()
        if worst_code >= _FAILED:
            self._accelerator.wait_for_everyone()  # all threads have ended
            if self._accelerator.is_main_process:
                partial = atomic_directory.partial_path(background_write.path)
                shutil.rmtree(partial, ignore_errors=True)
            self._raise_error(background_write.error, worst_code, background_write.path)
        return True

    def finish(self) -> None:
        """Collective. Wait until no checkpoint is being written.

        Raises the same errors as `poll`.
        """
        while not self.poll():
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Wait for the end of this process's thread.

        Not collective, so that a failed run can call it. The thread continues even if another rank
        exits, until the launcher kills this process.
        """
        if self._background_write is not None:
            self._background_write.join()

    def _worst_code(self, error: Exception | None, *, is_busy: bool = False) -> int:
        """Collective. Return the largest state code of all processes.

        The codes are _DONE, _BUSY, and _FAILED + errno. Every rank gets the same result.
        """
        code = _BUSY if is_busy else _DONE
        if error is not None:
            code = _FAILED + ((error.errno or 0) if isinstance(error, OSError) else 0)
        return max_over_ranks(self._accelerator, code)

    def _raise_error(self, error: Exception | None, worst_code: int, path: Path) -> NoReturn:
        """Raise the error of this process; if it has none, raise the error of another process.

        `worst_code`: the result of `_worst_code`, which contains the errno of the other process.
        """
        if error is not None:
            raise error
        if error_number := worst_code - _FAILED:
            raise OSError(error_number, os.strerror(error_number), str(path))
        raise WrongState(
            f"another process failed to write {path}", hint="read the log of that process"
        )

    def _write(
        self,
        path: Path,
        contents: Contents,
        copies: Mapping[str, Mapping[str, Tensor]],
        small_contents: Mapping[str, bytes],
        write_extra_files: LaterFiles | None,
        stop: threading.Event,
    ) -> None:
        """Write this process's part of a checkpoint.

        The main process then publishes the checkpoint. `copies`: the rows of this process, by file
        and tensor name. `small_contents`: other files that the main process writes, by name.
        `stop`: if set, the method returns early.
        """
        failpoint("checkpoint-writing")
        partial = atomic_directory.partial_path(path)
        digests: dict[str, atomic_directory.Digests] = {}
        for name, data in small_contents.items():
            digests[name] = atomic_directory.write_synced(partial / name, data)
        parts: dict[str, str] = {}
        for name, file in contents.layouts.items():
            writer = PartWriter(partial / name, file, self._part, self._parts)
            try:
                for tensor in file.places:
                    writer.write(tensor, copies[name][tensor])
                    if stop.is_set():
                        return
                parts[name] = writer.finish()
            finally:
                writer.close()
        for name, data in (
            write_extra_files(stop) if write_extra_files is not None else {}
        ).items():
            parts[name] = atomic_directory.write_synced(partial / name, data)
        failpoint("checkpoint-part-written")
        if not self._accelerator.is_main_process:
            announce_part(partial / _PARTS / f"{self._part}.json", parts)
            return
        digests_of_parts = [
            parts,
            *(self._wait_for_part(partial, part, stop) for part in range(1, self._parts)),
        ]
        if stop.is_set():
            return
        shutil.rmtree(partial / _PARTS)
        for name in {name: None for part_digests in digests_of_parts for name in part_digests}:
            file_digests = [
                part_digests[name] for part_digests in digests_of_parts if name in part_digests
            ]
            digests[name] = (
                file_digests
                if name in contents.layouts and len(digests_of_parts) > 1
                else file_digests[0]
            )
        self._before_publication()
        atomic_directory.publish(path, digests)
        self._after_publication()

    def _wait_for_part(self, partial: Path, part: int, stop: threading.Event) -> dict[str, str]:
        """Wait until process `part` has written its part.

        Return the digests of the part by file name. Returns {} if `stop` is set first.
        """
        path = partial / _PARTS / f"{part}.json"
        while not path.exists():
            if stop.wait(_PAUSE):
                return {}
        digests: dict[str, str] = json.loads(path.read_text())
        return digests


def announce_part(path: Path, digests: Mapping[str, str]) -> None:
    """Report to the main process that the part of this process is complete.

    Writes `digests`, the digests by file name, to the file `path`. The file appears by a rename,
    which is the last operation of this process in the temporary directory: as soon as the files of
    all parts exist, the main process deletes their directory.
    """
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(digests))
    unfinished.replace(path)


class _BackgroundWrite:
    """The thread that writes a checkpoint, its error, and the path of the checkpoint."""

    def __init__(self, path: Path, write: Callable[[threading.Event], None]) -> None:
        self.path = path
        self.error: Exception | None = None
        self._write = write
        self._stop = threading.Event()
        # A daemon: a run that ends with another error does not wait for the thread.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ask the thread to stop after the current tensor, and wait for the end of the thread."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write(self._stop)
        except Exception as error:  # noqa: BLE001 (the trainer raises it)
            log.warning("the checkpoint %s could not be written: %s", self.path.name, error)
            self.error = atomic_directory.as_disk_error(error, self.path) or error


class _HostMemory:
    """Buffers in host memory for this process's rows of all tensors.

    Every save uses the same buffers. The buffers are pinned if the tensors are on a GPU. Allocating
    new buffers for each save would take longer than the copy itself.
    """

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts = part, parts
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def copies(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Collective. Copy this process's rows of all tensors.

        Return the copies by file and name.
        """
        host_copies = {
            file: {name: self._copy((file, name), tensor) for name, tensor in named_tensors.items()}
            for file, named_tensors in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return host_copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        rows = self._own_rows(tensor)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(rows, non_blocking=True)

    def _own_rows(self, tensor: Tensor) -> Tensor:
        count = tensor.shape[0] if tensor.dim() else 1
        rows = rows_of_part(count, self._part, self._parts)
        if isinstance(tensor, DTensor) and tensor.device_mesh.shape == (self._parts,):
            return local(tensor)
        # With tensor parallelism, a process holds different rows, or not all of their columns.
        full_rows = full_tensor(tensor.detach())
        return (full_rows if full_rows.dim() else full_rows[None])[rows]
