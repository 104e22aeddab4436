"""Arguments of DistillClient that are refused before a call, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clients import DataConfig, DistillClient, JobHandle, OnPolicyJob, StudentConfig
from clients.jobs.client import _handle_of
from protos import distill_pb2 as pb
from protos.errors import InvalidInput

_Call = Callable[[Any, JobHandle], Any]
JOB = OnPolicyJob(student=StudentConfig(model="m"), data=DataConfig(path="d.jsonl"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client, job: client.list(state="DONE"), "state: there is no state 'DONE'; the st"),
        (lambda client, job: client.list(state=["UNKNOWN"]), "state: there is no state 'UNKNOWN'"),
        (lambda client, job: client.list(labels="a=b"), "labels: must be a dict of labels and va"),
        (lambda client, job: client.submit_all({}), "submit_all takes several jobs; give a list"),
        (lambda client, job: client.submit_all(JOB), "submit_all takes several jobs; give a list"),
        (lambda client, job: client.submit_all("a"), "submit_all takes several jobs; give a list"),
        (lambda client, job: client.get(3), "job_id: must be the id of a job (got a value of the"),
        *(
            (
                call,
                "job_id: must be the id of a job (got a value of the class JobHandle); give job.id",
            )
            for call in (
                lambda client, job: client.get(job),
                lambda client, job: client.wait(job),
                lambda client, job: client.cancel(job),
                lambda client, job: client.pull(job, "x"),
            )
        ),
    ],
)
def test_wrong_arguments(call: _Call, message: str) -> None:
    with DistillClient("localhost:1") as client, pytest.raises(InvalidInput) as caught:
        call(client, _handle_of(client, pb.Job(id="a")))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
