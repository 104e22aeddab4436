"""An S3 server for tests: moto on a free port of loopback, with one bucket."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from clients.runs.best_step import best_step
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import read_points
from protos.rpc.ports import free_ports

BUCKET = "rows"


class S3Server:
    """Ready when the constructor returns. What it stores outlives `stop` and `start`."""

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self.start()
        files = self.file_system()
        files.create_dir(BUCKET)

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of a process that uses this server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def file_system(self) -> Any:
        """Return a pyarrow file system with the rights of an administrator."""
        from pyarrow import fs

        return fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self._port}",
            scheme="http",
            access_key="test",
            secret_key="test",
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def refuse_everybody(self) -> None:
        self._post("/moto-api/reset-auth", b"0")

    def refuse_nobody(self) -> None:
        self._post("/moto-api/reset-auth", b"inf")

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names of the files below a prefix of the bucket."""
        from pyarrow import fs

        selector = fs.FileSelector(f"{BUCKET}/{prefix}", allow_not_found=True)
        return sorted(info.base_name for info in self.file_system().get_file_info(selector))

    def read(self, path: str) -> bytes:
        with self.file_system().open_input_stream(f"{BUCKET}/{path}") as stream:
            data: bytes = stream.read()
            return data

    def write(self, path: str, data: bytes) -> None:
        with self.file_system().open_output_stream(f"{BUCKET}/{path}") as stream:
            stream.write(data)

    def delete(self, path: str) -> None:
        self.file_system().delete_file(f"{BUCKET}/{path}")

    def digests(self, prefix: str) -> dict[str, str]:
        """Return the sha256 of every file below a prefix, except the claim of its writer."""
        return {
            name: hashlib.sha256(self.read(f"{prefix}/{name}")).hexdigest()
            for name in self.names(prefix)
            if name != "writer"
        }

    def wrong_copies(self, prefix: str, run: RunDirectory) -> list[str]:
        """Return the files of a finished run whose copies below a prefix are missing or differ.

        The storage must have the metrics, the export, the newest and the best checkpoint.
        """
        steps = run.checkpoint_steps()
        best = best_step(read_points(run.metrics), steps)
        assert best is not None
        folders = [run.export, run.checkpoint(steps[-1]), run.checkpoint(best)]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        names = {str(path.relative_to(run.path)): path for path in [run.metrics, *paths]}
        return [
            name
            for name, path in names.items()
            if self._read_or_none(f"{prefix}/{name}") != path.read_bytes()
        ]

    def _read_or_none(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def _post(self, path: str, body: bytes) -> None:
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(self.address + path, data=body, headers=kind)
        urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """The server of the tests of a module; each test uses its own prefix."""
    s3_server = S3Server()
    yield s3_server
    s3_server.stop()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in request.node.name)
