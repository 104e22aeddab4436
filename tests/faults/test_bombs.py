"""One bomb on every door of the programs: peak memory within the declared budget.

A door is a call, a page or a file that somebody else can send. Each bomb expands to hundreds of
MiB, or promises more than arrives. The test prints one table, which is in docs/faults.md.
"""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest

from clients.data.outside import MAX_BYTES
from clients.store.store import LogitStore, StoredRows
from distill_server.uploads import MAX_UPLOAD_FILES
from protos import distill_pb2, rollouts_pb2, rollouts_pb2_grpc, teacher_pb2, teacher_pb2_grpc
from protos.distill_pb2_grpc import DistillStub
from protos.rows.codec import RowBlock, compress_rows, encode_rows
from protos.rpc.transport import MAX_MESSAGE_BYTES
from teacher_service.http.app import MAX_BODY_BYTES
from teacher_service.http.clients import MAX_BODIES_BYTES
from teacher_service.serving.answer_budget import MAX_UNFINISHED_BYTES
from tests.faults.test_many_streams import client_process, eventually, open_streams, settled_bytes
from tests.security.processes import Program, server
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.conftest import student_path
from tests.student_trainer.rollout_service.processes import ServiceProcess
from tests.teacher_service.conftest import StartTeacher
from tests.teacher_service.http.asking import Site

__all__ = ["student_path"]

pytestmark = pytest.mark.slow
MIB = 1 << 20
CALLS = 16
# What a process may keep of any work: threads, connections, arenas of the allocator.
OVERHEAD = 48
BOMB_BYTES = 512 * MIB
REFUSALS = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class Table:
    """The doors, with the MiB that each may take above the process's memory before."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, float]] = []

    def measure(
        self, door: str, bomb: str, pid: int, budget_bytes: int, attack: Callable[[], object]
    ) -> None:
        process = psutil.Process(pid)
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM to the resident size
        resident = process.memory_info().rss
        attack()
        status = Path(f"/proc/{pid}/status").read_text()
        (peak_kib,) = (line.split()[1] for line in status.splitlines() if line[:6] == "VmHWM:")
        peak = ((int(peak_kib) << 10) - resident) / MIB
        self.rows.append((door, bomb, peak, budget_bytes / MIB + OVERHEAD))

    def check(self) -> None:
        print("\n| entry point | bomb | peak | budget |\n|---|---|---|---|")
        for door, bomb, peak, budget in self.rows:
            print(f"| {door} | {bomb} | {peak:.0f} MiB | {budget:.0f} MiB |")
        assert [door for door, _, peak, budget in self.rows if peak > 1.1 * budget] == []


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    # Freed memory returns to the system, so that the resident size has what a bomb adds.
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    return Table()


def send_bombs(address: str, call: Callable[[grpc.Channel], object]) -> None:
    """Make CALLS calls at once. Each must fail with a status."""

    def send(number: int) -> None:
        options = [("grpc.max_send_message_length", -1), ("test.number", number)]
        with grpc.insecure_channel(address, options=options) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                call(channel)
            assert caught.value.code() in REFUSALS

    with ThreadPoolExecutor(CALLS) as threads:
        list(threads.map(send, range(CALLS)))


def hold_half_requests(port: int, request: bytes, count: int = 100) -> None:
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.settimeout(5)
            with suppress(OSError):
                connection.sendall(request)


def test_a_teacher(table: Table, start_teacher: StartTeacher) -> None:
    settings = ("--engine", "fake", "--model", "vocab=300,max_length=70000", "--http-port", "0")
    teacher = start_teacher(*settings, "--max-top-k", "64", launched=True)
    site, pid = Site(teacher), teacher.process.pid
    assert site.ask("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}).status < 500

    def score(channel: grpc.Channel) -> object:
        request = teacher_pb2.ScoreRequest(token_ids=bytes(96 * MIB))
        calls = teacher_pb2_grpc.TeacherStub(channel)
        return list(calls.Score(iter([request]), timeout=120, compression=grpc.Compression.Gzip))

    table.measure(
        *("teacher, gRPC `Score`", f"{CALLS} gzip messages of 96 MiB", pid),
        CALLS * MAX_MESSAGE_BYTES,
        lambda: send_bombs(teacher.address, score),
    )

    def half_requests() -> None:
        process = psutil.Process(pid)
        with client_process(teacher, "half", 100) as halves:
            assert halves.stdout
            assert halves.stdout.readline()
            settled_bytes(process)
        eventually(lambda: open_streams(teacher) == 0, 60)

    rows = 14_000
    ids = {"prompt_logprob_token_ids": [[1]] * rows, "prompt_logprob_start": 0}
    quadratic = {"token_ids": [1] * rows, "sampling_params": {"max_tokens": 1, **ids}}
    table.measure(
        *("teacher, HTTP `/inference/v1/generate`", "72 kB, one id for each of 14,000 rows", pid),
        MAX_BODY_BYTES,
        lambda: site.ask("/inference/v1/generate", quadratic),
    )
    deep = b'{"prompt": ' + b"[" * (MAX_BODY_BYTES - 20)
    table.measure(
        *("teacher, HTTP `/v1/completions`", "8 MiB of brackets", pid),
        4 * MAX_BODY_BYTES,
        lambda: site.ask("/v1/completions", deep),
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    half = head + b"Content-Length: %d\r\n\r\n" % MAX_BODY_BYTES + bytes(MAX_BODY_BYTES - 1)
    table.measure(
        *("teacher, HTTP", "100 bodies of 8 MiB without the last byte", pid),
        MAX_BODIES_BYTES,
        lambda: hold_half_requests(site.port, half),
    )
    table.measure(
        *("teacher, gRPC `Score`", "100 requests of 32 MiB without an end", pid),
        # And for each stream the message of 1 MiB that arrives, in gRPC and in Python.
        MAX_UNFINISHED_BYTES + 100 * 2 * MIB,
        half_requests,
    )
    table.check()


def test_a_server(table: Table, tmp_path: Path) -> None:
    material = tiny.save_material(tmp_path)

    def check(program: Program, name: str) -> None:
        """Have the server check a job of which this is the data; any answer is right."""
        job = tiny.sft_job(material, data__path=str(tmp_path / name))
        with grpc.insecure_channel(program.address) as channel, suppress(grpc.RpcError):
            request = distill_pb2.CheckJobRequest(config_json=job.model_dump_json())
            DistillStub(channel).CheckJob(request, timeout=60)

    (tmp_path / "good.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    with server(tmp_path / "runs", "--dashboard", "0", launched=True) as program:
        dashboard = int(program.output.readline().rstrip("/\n").rpartition(":")[2])
        pid = program.process.pid
        check(program, "good.jsonl")

        def submit(channel: grpc.Channel) -> object:
            request = distill_pb2.SubmitJobRequest(config_json="x" * (96 * MIB))
            return DistillStub(channel).SubmitJob(
                request, timeout=120, compression=grpc.Compression.Gzip
            )

        table.measure(
            *("server, gRPC `SubmitJob`", f"{CALLS} gzip messages of 96 MiB", pid),
            CALLS * MAX_MESSAGE_BYTES,
            lambda: send_bombs(program.address, submit),
        )

        def begin_upload(channel: grpc.Channel) -> object:
            files = [
                distill_pb2.UploadFile(path=f"d/{n}", size=1 << 50, sha256=f"{n:064x}")
                for n in range(MAX_UPLOAD_FILES)
            ]
            return DistillStub(channel).BeginUpload(
                distill_pb2.BeginUploadRequest(files=files), timeout=120
            )

        table.measure(
            *("server, gRPC `BeginUpload`", f"{CALLS} times 10,000 files of a PiB each", pid),
            # Each of the files takes a hundred bytes in the message and six hundred as objects.
            CALLS * MAX_UPLOAD_FILES * 700,
            lambda: send_bombs(program.address, begin_upload),
        )

        def send_files(channel: grpc.Channel) -> object:
            part = distill_pb2.FilePart(sha256="0" * 64, data=bytes(96 * MIB))
            return DistillStub(channel).SendFiles(
                iter([part]), timeout=120, compression=grpc.Compression.Gzip
            )

        table.measure(
            *("server, gRPC `SendFiles`", f"{CALLS} gzip messages of 96 MiB", pid),
            CALLS * MAX_MESSAGE_BYTES,
            lambda: send_bombs(program.address, send_files),
        )
        head = b"POST /api/jobs/x/cancel HTTP/1.1\r\nHost: localhost\r\n"
        body = head + b"Content-Length: 67108864\r\n\r\n" + bytes(8 * MIB)
        table.measure(
            *("server, dashboard", "100 bodies of 8 MiB, where 64 MiB are announced", pid),
            100 * (64 << 10),
            lambda: hold_half_requests(dashboard, body),
        )
        for name, bomb, budget in write_files(tmp_path):
            table.measure(
                *(f"server, data file `{name}`", bomb, pid),
                budget,
                lambda name=name: check(program, name),
            )
    table.check()


def write_files(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Write files that expand to BOMB_BYTES; yield name, bomb and budget in bytes."""
    # A record: its bytes, its text, and its values while they are parsed.
    line, start = b'{"prompt": "' + b"x" * BOMB_BYTES + b'"}\n', 4 * MAX_BYTES
    (directory / "line.jsonl.gz").write_bytes(gzip.compress(line, 1))
    yield "line.jsonl.gz", "one line of 512 MiB in 2 MB", start
    with pa.CompressedOutputStream(str(directory / "line.jsonl.zst"), "zstd") as file:
        file.write(line)
    yield "line.jsonl.zst", "one line of 512 MiB in 47 kB", start
    (directory / "nested.json").write_bytes(b"[" * BOMB_BYTES)
    yield "nested.json", "512 MiB of brackets", start
    with pa.CompressedOutputStream(str(directory / "line.csv.zst"), "zstd") as file:
        file.write(b"prompt,completion\n" + b"x" * BOMB_BYTES)
    yield "line.csv.zst", "one cell of 512 MiB in 47 kB", start
    value = "x" * (16 * MIB)
    rows = pa.table({"prompt": [value] * 32, "completion": ["y"] * 32})
    pa.parquet.write_table(rows, directory / "dictionary.parquet", compression="zstd")
    # A page is decompressed whole, then becomes an array, and a text of Python.
    yield "dictionary.parquet", "a text of 16 MiB, 32 times, in 3 kB", 6 * 16 * MIB


def test_a_rollout_service(table: Table, student_path: Path, tmp_path: Path) -> None:
    service = ServiceProcess("--model", str(student_path), log=tmp_path / "log", launched=True)

    def sample(channel: grpc.Channel) -> object:
        part = rollouts_pb2.OrderPart(
            sequence=rollouts_pb2.SequenceRequest(token_ids=bytes(96 * MIB))
        )
        calls = rollouts_pb2_grpc.RolloutsStub(channel)
        return list(calls.Sample(iter([part]), timeout=120, compression=grpc.Compression.Gzip))

    try:
        table.measure(
            *("rollout service, gRPC `Sample`", f"{CALLS} gzip messages of 96 MiB"),
            *(service.process.pid, CALLS * MAX_MESSAGE_BYTES),
            lambda: send_bombs(service.address, sample),
        )
    finally:
        service.close()
    table.check()


_READER = """
import sys
from clients.store.dataset import LogitDataset
from protos.errors import Corrupt
print(flush=True)
sys.stdin.readline()
try:
    LogitDataset(sys.argv[1]).decoded(0)
except Corrupt as error:
    print(error.message, flush=True)
sys.stdin.readline()
"""


def test_rows_of_a_store(table: Table, tmp_path: Path) -> None:
    rows, k = 1024, 1 << 16
    wide = RowBlock(
        np.zeros((rows, k), np.int32),
        np.zeros((rows, k), np.float16),
        *(np.full(rows, -1, np.float32) for _ in range(2)),
    )
    facts = {"vocab_size": "50", "top_k": "3", "tail_samples": "0"}
    ids = np.zeros(rows + 2, "<i4").tobytes()
    with LogitStore(tmp_path / "store", write=True, metadata=facts) as store:
        store.append([StoredRows(b"k" * 32, ids, 2, compress_rows(encode_rows(wide)))])
    command = [sys.executable, "-c", _READER, str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin
        assert reader.stdout
        reader.stdout.readline()

        def read() -> None:
            assert reader.stdin
            assert reader.stdout
            reader.stdin.write(b"\n")
            reader.stdin.flush()
            assert b"takes more than" in reader.stdout.readline()

        table.measure("client, rows of a store", "384 MiB in 40 kB", reader.pid, 0, read)
        reader.stdin.close()
    table.check()
