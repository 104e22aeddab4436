"""Writes checkpoints while training goes on.

    save      every process copies its part of the tensors to host memory; training stops for this
    writing   a thread of every process writes its part, hashes it and syncs it to disk
    publish   the thread of the main process waits for the parts, renames the directory, and then
              deletes older checkpoints

The threads use no collectives. A thread tells the main process that its part is complete by a file
with the digests in the temporary directory, and `poll` shares their errors between steps. Nothing
of this changes what the run computes. At most one checkpoint is being written at a time.
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
from student_trainer.checkpoints.checkpoint import Contents, checkpoint_path, state_text
from student_trainer.checkpoints.tensor_file import PartWriter
from student_trainer.parallel.collectives import largest
from student_trainer.parallel.shards import full_tensor, local, rows_of_part
from student_trainer.teachers.rollouts_ahead import LaterFiles

log = logging.getLogger(__name__)

_PAUSE = 0.02  # seconds between two looks at the other threads
_PARTS = "parts"  # directory of the files that say that a part is complete
# What a process says of its thread; above _FAILED, the errno of the error.
_DONE, _BUSY, _FAILED = 0, 1, 2


class Saver:
    """Writes the checkpoints of a run. Every process has one, and calls it at the same steps."""

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
        """Keep what all checkpoints have in common.

        `small_files`: of the model directory; `facts`: strings that `facts_of` returns. The thread
        of the main process calls `before_publication` and `after_publication`.
        """
        self._accelerator = accelerator
        self._root = root
        self._small_files = small_files
        self._facts = facts
        self._before_publication = before_publication
        self._after_publication = after_publication
        self._part, self._parts = accelerator.process_index, accelerator.num_processes
        self._host = _HostMemory(self._part, self._parts)
        self._writing: _Writing | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; the same in every process."""
        return self._writing is not None

    def save(
        self,
        step: int,
        stored: Contents,
        metrics: Mapping[str, float] | None = None,
        later: LaterFiles | None = None,
    ) -> None:
        """Collective. Copy the state of a run, and begin to write it as the checkpoint of `step`.

        Waits for the checkpoint before. `metrics`: those of the step, which `metrics_of` returns.
        `later`: makes further files of this process, in the thread that writes. Raises WrongState
        if a newer attempt has taken over the run, and OSError, on all ranks.
        """
        self.finish()
        path = checkpoint_path(self._root, step)
        error: Exception | None = None
        if self._accelerator.is_main_process:
            try:
                partial = atomic_directory.begin(path)
                (partial / "model").mkdir()
                (partial / _PARTS).mkdir()
            except (OSError, DistillError) as caught:
                error = caught
        if (worst := self._worst(error)) >= _FAILED:
            self._raise(error, worst, path)
        copies = self._host.copies(stored.tensors)
        failpoint("checkpoint-copied")
        small: dict[str, bytes] = {}
        if self._accelerator.is_main_process:
            small = {f"model/{name}": data for name, data in self._small_files.items()}
            small |= {**stored.index, "state.json": state_text(step, self._facts, metrics)}

        def write(stop: threading.Event) -> None:
            self._write(path, stored, copies, small, later, stop)

        self._writing = _Writing(path, write)

    def poll(self) -> bool:
        """Collective. Return whether nothing is being written; it does not wait.

        Raises the error of a thread, on all ranks, after removing what was written.
        """
        if self._writing is None:
            return True
        writing = self._writing
        busy = writing.is_busy  # before the error: a thread that has ended keeps its own
        worst = self._worst(writing.error, busy=busy)
        if worst == _BUSY:
            return False
        self._writing = None
        writing.stop()
        if worst >= _FAILED:
            self._accelerator.wait_for_everyone()  # all threads have ended
            if self._accelerator.is_main_process:
                partial = atomic_directory.partial_of(writing.path)
                shutil.rmtree(partial, ignore_errors=True)
            self._raise(writing.error, worst, writing.path)
        return True

    def finish(self) -> None:
        """Collective. Wait until nothing is being written. Raises as `poll` does."""
        while not self.poll():
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Wait for this process's thread. Not collective: for a run that ends with any error.

        A rank that has ended does not stop it: its launcher then kills this process.
        """
        if self._writing is not None:
            self._writing.join()

    def _worst(self, error: Exception | None, *, busy: bool = False) -> int:
        """Collective. Return the largest code of all processes; every one sees every failure."""
        code = _BUSY if busy else _DONE
        if error is not None:
            code = _FAILED + ((error.errno or 0) if isinstance(error, OSError) else 0)
        return largest(self._accelerator, code)

    def _raise(self, error: Exception | None, worst: int, path: Path) -> NoReturn:
        """Raise this process's own error, or else that of another process."""
        if error is not None:
            raise error
        if number := worst - _FAILED:
            raise OSError(number, os.strerror(number), str(path))
        raise WrongState(f"another process failed to write {path}", hint="its log has the reason")

    def _write(
        self,
        path: Path,
        stored: Contents,
        copies: Mapping[str, Mapping[str, Tensor]],
        small: Mapping[str, bytes],
        later: LaterFiles | None,
        stop: threading.Event,
    ) -> None:
        """Write this process's part; in the main process, then publish the checkpoint."""
        failpoint("checkpoint-writing")
        partial = atomic_directory.partial_of(path)
        digests: dict[str, atomic_directory.Digests] = {}
        for name, data in small.items():
            digests[name] = atomic_directory.write_synced(partial / name, data)
        parts: dict[str, str] = {}
        for name, file in stored.layouts.items():
            writer = PartWriter(partial / name, file, self._part, self._parts)
            try:
                for tensor in file.places:
                    writer.write(tensor, copies[name][tensor])
                    if stop.is_set():
                        return
                parts[name] = writer.finish()
            finally:
                writer.close()
        for name, data in (later(stop) if later is not None else {}).items():
            parts[name] = atomic_directory.write_synced(partial / name, data)
        failpoint("checkpoint-part-written")
        if not self._accelerator.is_main_process:
            announce_part(partial / _PARTS / f"{self._part}.json", parts)
            return
        every = [parts, *(self._part_of(partial, part, stop) for part in range(1, self._parts))]
        if stop.is_set():
            return
        shutil.rmtree(partial / _PARTS)
        for name in {name: None for one in every for name in one}:
            of_parts = [one[name] for one in every if name in one]
            digests[name] = of_parts if name in stored.layouts and len(every) > 1 else of_parts[0]
        self._before_publication()
        atomic_directory.publish(path, digests)
        self._after_publication()

    def _part_of(self, partial: Path, part: int, stop: threading.Event) -> dict[str, str]:
        """Wait until another process has written its part, and return its digests by file."""
        path = partial / _PARTS / f"{part}.json"
        while not path.exists():
            if stop.wait(_PAUSE):
                return {}
        found: dict[str, str] = json.loads(path.read_text())
        return found


def announce_part(path: Path, digests: Mapping[str, str]) -> None:
    """Tell the main process that a part is complete, by the file `path` with its digests by file.

    Nothing follows the rename: the main process deletes the directory once every file is there.
    """
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(digests))
    unfinished.replace(path)


class _Writing:
    """A checkpoint that is being written, and the thread that writes."""

    def __init__(self, path: Path, write: Callable[[threading.Event], None]) -> None:
        self.path = path
        self.error: Exception | None = None
        self._write = write
        self._stop = threading.Event()
        # A daemon: where a run ends with an error of something else, no process waits for it.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Wait for the end of the thread, which does not begin another tensor."""
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write(self._stop)
        except Exception as error:
            log.warning("the checkpoint %s could not be written: %s", self.path.name, error)
            self.error = atomic_directory.of_disk(error, self.path) or error


class _HostMemory:
    """Host memory for this process's rows of all tensors; every save uses it again.

    It is pinned if the tensors are on a GPU. A new allocation for each save would take longer than
    the copy.
    """

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts = part, parts
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def copies(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Collective. Return this process's rows of all tensors, by file and name, all copied."""
        found = {
            file: {name: self._copy((file, name), tensor) for name, tensor in of.items()}
            for file, of in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return found

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        rows = self._rows(tensor)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(rows, non_blocking=True)

    def _rows(self, tensor: Tensor) -> Tensor:
        count = tensor.shape[0] if tensor.dim() else 1
        rows = rows_of_part(count, self._part, self._parts)
        if isinstance(tensor, DTensor) and tensor.device_mesh.shape == (self._parts,):
            return local(tensor)
        # With tensor parallelism, a process has other rows, or not all of their columns.
        whole = full_tensor(tensor.detach())
        return (whole if whole.dim() else whole[None])[rows]
