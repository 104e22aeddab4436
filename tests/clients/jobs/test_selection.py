"""Jobs selected by owner and labels, with a server that does not support them yet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from clients.cli.chosen_jobs import jobs_in
from clients.jobs.client import DistillClient
from clients.jobs.job import JobState
from protos import distill_pb2 as pb
from protos import distill_pb2_grpc
from protos.errors import WrongState


class OlderServer(distill_pb2_grpc.DistillServicer):
    """Ignores the newer fields of the request and lists all jobs."""

    def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        state = request.state or pb.RUNNING
        return pb.ListJobsResponse(jobs=[pb.Job(id="of-somebody-else", state=state)])


@pytest.fixture
def client() -> Iterator[DistillClient]:
    server = grpc.server(ThreadPoolExecutor(2))
    distill_pb2_grpc.add_DistillServicer_to_server(OlderServer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with DistillClient(f"127.0.0.1:{port}") as client:
        yield client
    server.stop(None)


@pytest.mark.parametrize("selection", [{"own_only": True}, {"labels": {"for": "paper"}}])
def test_no_job_of_others_is_chosen(client: DistillClient, selection: dict[str, Any]) -> None:
    """Otherwise `distill cancel --mine` would cancel the jobs of all owners."""
    assert jobs_in(client, {JobState.RUNNING})
    with pytest.raises(WrongState, match="has no owners and labels"):
        jobs_in(client, {JobState.RUNNING}, **selection)
    with pytest.raises(WrongState, match="has no owners and labels"):
        client.list(owner="ann")


def test_states_and_ages_that_an_older_server_does_not_know(client: DistillClient) -> None:
    """It lists jobs in any state and of any age."""
    assert not jobs_in(client, {JobState.FAILED, JobState.CANCELLED})
    assert jobs_in(client, {JobState.FAILED, JobState.RUNNING})
    state: Any = "RUNNING"  # in a program without types
    assert [job.state for job in client.list(state=state)] == [JobState.RUNNING]
    with pytest.raises(WrongState, match="cannot choose jobs by their age"):
        jobs_in(client, {JobState.RUNNING}, older_than_seconds=60)
