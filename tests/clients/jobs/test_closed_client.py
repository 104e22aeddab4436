"""Calls of clients that are closed, and of their handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from clients import AsyncDistillClient, DistillClient, JobHandle
from clients.jobs.client import _handle_of
from protos import distill_pb2 as pb
from protos.errors import WrongState

REFUSAL = "the client of the distill server localhost:1 is closed; make a new client"


@pytest.mark.parametrize(
    "call",
    [
        lambda job: job.refresh(),
        lambda job: job.cancel(),
        lambda job: next(job.watch()),
        lambda job: next(job.logs()),
        lambda job: job.client.list(),
        lambda job: next(job.client._iterate_events("a", 0, None)),
    ],
)
def test_a_handle_of_a_closed_client(call: Callable[[JobHandle], Any]) -> None:
    with DistillClient("localhost:1") as client:
        job = _handle_of(client, pb.Job(id="a"))
    with pytest.raises(WrongState, match=REFUSAL):
        call(job)


def test_a_closed_async_client() -> None:
    async def use_client() -> None:
        async with AsyncDistillClient("localhost:1") as client:
            pass
        with pytest.raises(WrongState, match=REFUSAL):
            await client.list()
        with pytest.raises(WrongState, match=REFUSAL):
            await anext(client.watch("a"))

    asyncio.run(use_client())
