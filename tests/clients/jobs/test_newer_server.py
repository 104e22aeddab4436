"""Jobs of a newer server, in states that this client does not know."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from clients.cli.app import main
from clients.jobs.client import DistillClient
from clients.jobs.job import UNKNOWN, JobState
from protos import distill_pb2 as pb
from protos import distill_pb2_grpc
from protos.rpc.transport import STREAM_OPEN

NEW_STATE: Any = 99


class NewerServer(distill_pb2_grpc.DistillServicer):
    """Its job runs, and ends in a new state."""

    def __init__(self) -> None:
        self._events = [
            pb.JobEvent(seq=1, state=pb.RUNNING, step=1),
            pb.JobEvent(seq=2, state=NEW_STATE, step=2),
        ]
        self.watches = 0

    def _job(self) -> pb.Job:
        return pb.Job(id="job-1", state=NEW_STATE, last_seq=2, created_at=1e9)

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.Job:
        return self._job()

    def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=[self._job(), pb.Job(id="job-2", state=pb.RUNNING)])

    def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> Iterator[pb.JobEvent]:
        self.watches += 1
        context.send_initial_metadata((STREAM_OPEN,))
        yield from (event for event in self._events if event.seq > request.after_seq)


@pytest.fixture
def server() -> Iterator[tuple[NewerServer, str]]:
    servicer = NewerServer()
    server = grpc.server(ThreadPoolExecutor(2))
    distill_pb2_grpc.add_DistillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def test_an_unknown_state(server: tuple[NewerServer, str]) -> None:
    servicer, address = server
    with DistillClient(address) as client:
        jobs = client.list()
        assert [job.state for job in jobs] == [UNKNOWN, JobState.RUNNING]
        assert [event.state for event in client.watch("job-1")] == [JobState.RUNNING, UNKNOWN]
        assert client.wait("job-1", timeout=60).state is UNKNOWN
        assert [job.id for job in client.list(state=[JobState.RUNNING])] == ["job-2"]
    assert servicer.watches == 2


def test_commands(server: tuple[NewerServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", server[1], "ls"]) == 0
    assert ["job-1", "UNKNOWN"] in [
        line.split()[:2] for line in capsys.readouterr().out.splitlines()
    ]
    assert main(["--server", server[1], "--json", "show", "job-1"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "UNKNOWN"


def test_the_state_is_no_state_of_a_server() -> None:
    assert UNKNOWN not in list(JobState)
    assert copy.deepcopy(UNKNOWN) is UNKNOWN
    assert pickle.loads(pickle.dumps(UNKNOWN)) is UNKNOWN
    assert (UNKNOWN.value, UNKNOWN.name, str(UNKNOWN)) == ("UNKNOWN", "UNKNOWN", "UNKNOWN")
    with pytest.raises(ValueError, match="not a valid JobState"):
        JobState("UNKNOW")
