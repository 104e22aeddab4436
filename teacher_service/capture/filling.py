"""The loop: one file of the plan after the other, each written while the next is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from clients.runs.directory import Verdict
from clients.store.facts import key_of
from clients.store.shards import StoredRows
from protos.errors import InternalFault
from protos.rows.codec import RowBlock
from teacher_service.capture.plan import Plan
from teacher_service.capture.recorder import Recorder, Stopped
from teacher_service.capture.sources import RowSource
from teacher_service.capture.writer import StoreWriter

Encode = Callable[[RowBlock], bytes]


def fill(
    writer: StoreWriter,
    source: RowSource,
    plan: Plan,
    missing: range,
    recorder: Recorder,
    encode: Encode,
) -> Verdict:
    """Score the files that are missing. What is complete stays, however it ends."""
    with ThreadPoolExecutor(1, "writer") as thread:
        written = thread.submit(lambda: None)
        try:
            for number, rows in zip(missing, source.files(missing, recorder.scored), strict=True):
                written.result()
                written = thread.submit(_write, writer, plan, plan.file(number), rows, encode)
        except Stopped:
            return "cancelled"
        written.result()
    recorder.tell()
    return "succeeded"


def _write(
    writer: StoreWriter,
    plan: Plan,
    indices: range,
    rows: Sequence[RowBlock | bytes],
    encode: Encode,
) -> None:
    entries = []
    for index, block in zip(indices, rows, strict=True):
        sequence = plan[index]
        token_ids = sequence.token_ids.astype("<i4").tobytes()
        data = block if isinstance(block, bytes) else encode(block)
        entries.append(StoredRows(key_of(index), token_ids, sequence.start, data))
    try:
        writer.append(entries)
    except OSError as error:
        raise InternalFault(
            f"cannot write {writer.path}: {error.strerror or error}",
            hint="what is complete is kept; make room, then resume the job",
        ) from error
