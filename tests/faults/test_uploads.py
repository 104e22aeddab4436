"""The network or the server fails ten times during an upload; no data is sent twice."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.data import DataConfig
from clients.jobs.client import DistillClient
from clients.jobs.upload import UploadProgress
from protos.errors import Unavailable
from tests.distill_server.conftest import SCRIPTED, Server, job_config
from tests.faults.proxy import FaultProxy, Toxics
from tests.forked_python import ForkedPython

SIZE, BREAKS = 32 << 20, 10
LINE_BYTES = 1 << 14
# Sent again per break: the interrupted part, and what the server had not read (transport.py).
MAX_LOST_BYTES = 1 << 20


class BreakingServer(Server):
    """Its first processes die at a failpoint each, as listed in `specs`."""

    def __init__(self, runs: Path, specs: Sequence[str]) -> None:
        super().__init__(runs)
        self._specs = list(specs)

    def launch(self) -> subprocess.Popen[str]:
        arguments = [str(self.runs), self.host, str(self.port), str(self.slots)]
        spec = self._specs.pop(0) if self._specs else ""
        environment = {**os.environ, "DISTILL_FAILPOINT": spec}
        return ForkedPython(
            [*SCRIPTED, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )

    def rise_again(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.process.wait(60) == -signal.SIGKILL
        self.process.stdout.close()
        self.start()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Records that do not compress well, in a file of the size of a small model."""
    path, source = tmp_path / "train.jsonl", random.Random(0)
    empty_line = json.dumps({"prompt": "", "answer": "1"}) + "\n"
    with path.open("w") as file:
        for _ in range(SIZE // LINE_BYTES):
            prompt = b64encode(source.randbytes(LINE_BYTES)).decode()
            file.write(empty_line.replace('""', f'"{prompt[: LINE_BYTES - len(empty_line)]}"'))
    return path


def job_of(data: Path) -> OnPolicyJob:
    return job_config().model_copy(update={"data": DataConfig(path=str(data))})


def path_of(job: OnPolicyJob) -> Path:
    assert job.data is not None
    return Path(job.data.path)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def breaking_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BreakingServer]:
    server = BreakingServer(tmp_path / "runs", request.param)
    server.start()
    yield server
    server.clean_up()


@pytest.mark.parametrize("breaking_server", [[]], indirect=True)
def test_a_network_that_breaks_ten_times(breaking_server: BreakingServer, data: Path) -> None:
    reports: list[UploadProgress] = []
    with FaultProxy(breaking_server.address, Toxics(reset_after_bytes=3 << 20)) as proxy:

        def report(progress: UploadProgress) -> None:
            reports.append(progress)
            if proxy.resets >= BREAKS:
                proxy.toxics = Toxics()

        with DistillClient(proxy.address) as client:
            (ready,) = client.upload([job_of(data)], report)
        assert proxy.resets >= BREAKS
        assert digest(path_of(ready)) == digest(data)
        assert ready.data.path == str(path_of(ready)), "the suffix tells the format"
        print(f"sent {proxy.carried_bytes / SIZE:.3f} times its size")
        assert proxy.carried_bytes < SIZE + proxy.resets * MAX_LOST_BYTES
        with DistillClient(proxy.address) as client:
            carried_before = proxy.carried_bytes
            assert client.upload([job_of(data)]) == [ready]
            assert proxy.carried_bytes - carried_before < 10_000, "the server has it"
    assert reports[0] == UploadProgress("data.path", 0, SIZE, begins=True)
    assert reports[-1].sent_bytes == SIZE


@pytest.mark.parametrize(
    "breaking_server", [["upload-part-written:kill:12"] * BREAKS], indirect=True
)
def test_a_server_that_is_killed_ten_times(breaking_server: BreakingServer, data: Path) -> None:
    outcomes: list[OnPolicyJob | Exception] = []
    with FaultProxy(breaking_server.address) as proxy, DistillClient(proxy.address) as client:

        def upload() -> None:
            try:
                outcomes.extend(client.upload([job_of(data)]))
            except Exception as error:
                outcomes.append(error)

        sender = threading.Thread(target=upload)
        sender.start()
        for _ in range(BREAKS):
            breaking_server.rise_again()
        sender.join(60)
        (ready,) = outcomes
        assert isinstance(ready, OnPolicyJob), ready
        assert digest(path_of(ready)) == digest(data)
        print(f"sent {proxy.carried_bytes / SIZE:.3f} times its size")
        assert proxy.carried_bytes < SIZE + BREAKS * MAX_LOST_BYTES


@pytest.mark.parametrize(
    "breaking_server", [["upload-verified:kill", "upload-linked:kill"]], indirect=True
)
def test_a_server_that_is_killed_at_the_end(
    breaking_server: BreakingServer, tmp_path: Path
) -> None:
    data, records = tmp_path / "train.jsonl", b'{"prompt": "1+1=", "answer": "2"}\n' * 30
    data.write_bytes(records)
    with DistillClient(breaking_server.address) as client:
        rising = threading.Thread(
            target=lambda: [breaking_server.rise_again(), breaking_server.rise_again()]
        )
        rising.start()
        (ready,) = client.upload([job_of(data)])
        rising.join(60)
        assert path_of(ready).read_bytes() == records


def test_a_server_that_is_away(data: Path) -> None:
    """Fails at once, as other commands do, not after the patience of a stream."""
    with (
        DistillClient("localhost:1", patience_seconds=1000) as client,
        pytest.raises(Unavailable, match="cannot reach the distill server"),
    ):
        client.upload([job_of(data)])
