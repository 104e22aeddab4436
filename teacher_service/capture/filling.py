"""The capture loop: scores the files of the plan, and writes each file during the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from clients.runs.directory import Verdict
from clients.store.manifest import key_of
from clients.store.shards import StoredRows
from clients.store.writer import StoreWriter
from protos.errors import DistillError, InternalFault
from protos.rows.codec import RowBlock
from teacher_service.capture.plan import CapturePlan
from teacher_service.capture.recorder import CaptureStopped, Recorder
from teacher_service.capture.sources import RowSource

Encode = Callable[[RowBlock], bytes]


def fill(
    writer: StoreWriter,
    source: RowSource,
    plan: CapturePlan,
    missing: range,
    recorder: Recorder,
    encode: Encode,
) -> Verdict:
    """Score the files of the plan with the numbers `missing`, and write them to the store.

    `encode` returns the codec bytes of a block of rows; it is used if `source` returns blocks.

    Returns "succeeded", or "cancelled" if the job was asked to stop. Complete files are kept in
    both cases. Raises InternalFault if the disk cannot be written, and the errors of `source`,
    `encode` and `writer`.
    """
    with ThreadPoolExecutor(1, "writer") as writer_thread:
        pending_write = writer_thread.submit(lambda: None)
        try:
            for number, file_rows in zip(
                missing, source.files(missing, recorder.count_sequence), strict=True
            ):
                pending_write.result()
                pending_write = writer_thread.submit(
                    _write, writer, plan, plan.file(number), file_rows, encode
                )
        except CaptureStopped:
            return "cancelled"
        pending_write.result()
    recorder.write_line()
    return "succeeded"


def _write(
    writer: StoreWriter,
    plan: CapturePlan,
    indices: range,
    rows: Sequence[RowBlock | bytes],
    encode: Encode,
) -> None:
    entries = []
    for index, sequence_rows in zip(indices, rows, strict=True):
        sequence = plan[index]
        token_ids = sequence.token_ids.astype("<i4").tobytes()
        encoded_rows = sequence_rows if isinstance(sequence_rows, bytes) else encode(sequence_rows)
        entry = StoredRows(key_of(index), token_ids, sequence.start, encoded_rows, sequence.images)
        entries.append(entry)
    try:
        writer.append(entries)
    except DistillError:  # some are OSErrors too
        raise
    except OSError as error:
        raise InternalFault(
            f"cannot write {writer.place}: {error.strerror or error}",
            hint="complete files are kept; free disk space, then resume the job",
        ) from error
