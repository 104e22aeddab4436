"""Downloads over a connection that breaks, with servers of both versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.jobs.client import DistillClient
from protos import distill_pb2 as pb
from protos import distill_pb2_grpc
from protos.errors import Unavailable
from protos.rpc.transport import STREAM_OPEN

FILES = {"a.txt": b"0123456789", "b/empty": b"", "b/model.bin": b"abcdefghijkl", "z": b"!"}


class BreakingServer(distill_pb2_grpc.DistillServicer):
    """Breaks each stream after `breaks[n]` chunks of at most 4 bytes; the next ones are whole."""

    def __init__(self, breaks: list[int], *, is_older: bool) -> None:
        self.breaks = breaks
        self._is_older = is_older
        self.sent: list[tuple[str, int]] = []

    def GetArtifact(
        self, request: pb.GetArtifactRequest, context: Any
    ) -> Iterator[pb.ArtifactChunk]:
        count = self.breaks.pop(0) if self.breaks else 1000
        begin = ("", 0) if self._is_older else (request.path, request.offset)
        if not self._is_older:
            context.send_initial_metadata((STREAM_OPEN,))
        for chunk in self._chunks(*begin):
            if not count:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            count -= 1
            self.sent.append((chunk.path, len(chunk.data)))
            yield chunk

    def _chunks(self, begin_path: str, begin: int) -> Iterator[pb.ArtifactChunk]:
        for path, content in FILES.items():
            if path < begin_path:
                continue
            offset = begin if path == begin_path else 0
            while True:
                data = content[offset : offset + 4]
                last = offset + len(data) == len(content)
                sha256 = hashlib.sha256(content).hexdigest() if last else ""
                yield pb.ArtifactChunk(
                    path=path, offset=offset, data=data, last=last, sha256=sha256
                )
                if last:
                    break
                offset += 4


@contextmanager
def serving(breaks: list[int], *, is_older: bool) -> Iterator[tuple[BreakingServer, DistillClient]]:
    servicer = BreakingServer(breaks, is_older=is_older)
    server = grpc.server(ThreadPoolExecutor(2))
    distill_pb2_grpc.add_DistillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with DistillClient(f"127.0.0.1:{port}", patience_seconds=60) as client:
        yield servicer, client
    server.stop(None)


def read_files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("breaks", [[0], [1], [3], [4], [5, 0, 1], [7], [8]])
@pytest.mark.parametrize("is_older", [False, True])
def test_a_download_goes_on(breaks: list[int], is_older: bool, tmp_path: Path) -> None:
    """After breaks before, within and between files; an older server begins again."""
    with serving([*breaks], is_older=is_older) as (servicer, client):
        folder = client.pull("job", tmp_path / "out")
    assert read_files(folder) == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    sent_bytes = sum(size for _, size in servicer.sent)
    if not is_older:
        assert sent_bytes == sum(map(len, FILES.values())), "no byte twice"


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with serving([0] * 1000, is_older=True) as (_, client):
        client._connection._patience = 0.2
        with pytest.raises(Unavailable):
            client.pull("job", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
