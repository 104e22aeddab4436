"""Decisions of the schedule of orders, with loads that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from protos.errors import Corrupt, Overloaded, Unavailable
from student_trainer.rollout_client.order import InFlight, WeightsVersion
from student_trainer.rollout_service.schedule import Schedule, ScheduleEntry


class Weights:
    """A loader whose loads end on the test's call of `end`."""

    def __init__(self) -> None:
        self.requested_versions: list[str] = []
        self._ends: list[asyncio.Future[None]] = []

    async def load(self, weights: WeightsVersion) -> None:
        self.requested_versions.append(f"{weights.lineage}{weights.number}")
        self._ends.append(asyncio.get_running_loop().create_future())
        await self._ends[-1]

    async def end(self, error: Exception | None = None) -> None:
        await settle()
        if error is None:
            self._ends[-1].set_result(None)
        else:
            self._ends[-1].set_exception(error)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def version(name: str, in_flight: InFlight = "drain") -> WeightsVersion:
    return WeightsVersion(name[0], int(name[1:]), Path("/x"), in_flight)


def is_running(entry: ScheduleEntry) -> bool:
    return entry._started.is_set() and entry.error is None


def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_orders_of_one_version_run_at_once_after_one_load() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        entries = [schedule.enter(version("a1")) for _ in range(3)]
        assert not any(map(is_running, entries))
        await weights.end()
        assert all(map(is_running, entries))
        assert is_running(schedule.enter(version("a1")))
        assert (weights.requested_versions, schedule.running_count, schedule.waiting_count) == (
            ["a1"],
            4,
            0,
        )

    run_scenario(scenario())


def test_another_version_drains() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        old = [schedule.enter(version("a1")) for _ in range(2)]
        await weights.end()
        new = schedule.enter(version("a2"))
        late = schedule.enter(version("a1"))  # while its weights are loaded
        assert is_running(late)
        for entry in (*old, late):
            await settle()
            assert weights.requested_versions == ["a1"]
            schedule.leave(entry)
        await weights.end()
        assert is_running(new)
        assert weights.requested_versions == ["a1", "a2"]

    run_scenario(scenario())


def test_two_lineages_take_turns_by_age() -> None:
    """A trainer with a sequence of orders of one version does not block other trainers."""

    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        first = schedule.enter(version("a1"))
        await weights.end()
        other_lineage = schedule.enter(version("b1"))
        second = schedule.enter(version("a1"))
        third = schedule.enter(version("b1"))
        assert not is_running(second)
        schedule.leave(first)
        await weights.end()
        assert is_running(other_lineage)
        assert not is_running(third)  # behind an older order of the other lineage
        schedule.leave(other_lineage)
        await weights.end()
        assert is_running(second)
        schedule.leave(second)
        await weights.end()
        assert is_running(third)
        assert weights.requested_versions == ["a1", "b1", "a1", "b1"]

    run_scenario(scenario())


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_a_newer_version_in_flight_is_loaded_while_orders_run(in_flight: InFlight) -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        running = schedule.enter(version("a2", in_flight))
        await weights.end()
        newer = schedule.enter(version("a3", in_flight))
        await weights.end()
        assert is_running(running)
        assert is_running(newer)
        older = schedule.enter(version("a1", in_flight))
        other_lineage = schedule.enter(version("b9", in_flight))
        await settle()
        assert weights.requested_versions == [
            "a2",
            "a3",
        ]  # neither an older version nor another lineage
        schedule.leave(running)
        schedule.leave(newer)
        await weights.end()
        assert is_running(older)
        schedule.leave(older)
        await weights.end()
        assert is_running(other_lineage)

    run_scenario(scenario())


def test_a_failed_load_fails_its_orders_only() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        entries = [schedule.enter(version(name)) for name in ("a1", "a2", "a1")]
        await weights.end(Corrupt("half"))
        for entry in (entries[0], entries[2]):
            with pytest.raises(Corrupt, match="half"):
                await entry.wait_until_started()
        await weights.end()
        assert is_running(entries[1])
        schedule.leave(entries[1])
        retried = schedule.enter(version("a1"))
        await weights.end()
        assert is_running(retried)
        assert weights.requested_versions == ["a1", "a2", "a1"]
        assert schedule.loads == 2

    run_scenario(scenario())


def test_orders_that_run_end_if_their_weights_are_lost() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        entry = schedule.enter(version("a1"))
        entry.sampling = asyncio.create_task(asyncio.sleep(3600))
        await weights.end()
        schedule.enter(version("a2", "keep"))
        await weights.end(Corrupt("half"))
        assert entry.sampling.cancelled()
        assert isinstance(entry.error, Corrupt)

    run_scenario(scenario())


def test_an_order_that_leaves_frees_its_place() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        running = schedule.enter(version("a1"))
        await weights.end()
        leaving, staying = schedule.enter(version("b1")), schedule.enter(version("a1"))
        schedule.leave(leaving)
        assert is_running(staying)
        for entry in (running, running, staying, leaving):
            schedule.leave(entry)
        assert (schedule.running_count, schedule.waiting_count) == (0, 0)
        schedule.leave(schedule.enter(version("c1")))  # while its weights are loaded
        await weights.end()
        last = schedule.enter(version("c1"))
        assert is_running(last)

    run_scenario(scenario())


def test_waiting_orders_are_bounded() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load, max_waiting=2)
        schedule.enter(version("a1"))
        schedule.enter(version("a1"))
        with pytest.raises(Overloaded, match="2 orders wait"):
            schedule.enter(version("a1"))
        await weights.end()
        schedule.enter(version("a1"))

    run_scenario(scenario())


def test_a_service_that_stops_fails_the_waiting_orders() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)
        running = schedule.enter(version("a1"))
        await weights.end()
        waits = schedule.enter(version("a2"))
        schedule.drain()
        assert is_running(running)
        with pytest.raises(Unavailable, match="is stopping"):
            await waits.wait_until_started()
        with pytest.raises(Unavailable, match="is stopping"):
            schedule.enter(version("a1"))
        schedule.leave(running)
        await settle()
        assert weights.requested_versions == ["a1"]

    run_scenario(scenario())


def test_it_rests_only_without_orders_and_loads_again_afterwards() -> None:
    async def scenario() -> None:
        weights, may_wake = Weights(), asyncio.Event()
        sleep_events: list[str] = []

        async def sleep() -> None:
            sleep_events.append("begun")
            await may_wake.wait()
            sleep_events.append("ended")

        schedule = Schedule(weights.load)
        entry = schedule.enter(version("a1"))
        await schedule.sleep(sleep)  # a load runs
        await weights.end()
        await schedule.sleep(sleep)  # an order runs
        assert sleep_events == []
        schedule.leave(entry)
        resting = asyncio.create_task(schedule.sleep(sleep))
        await settle()
        next_entry = schedule.enter(version("a1"))
        await settle()
        assert (sleep_events, weights.requested_versions, schedule.loaded_version) == (
            ["begun"],
            ["a1"],
            None,
        )
        may_wake.set()
        await resting
        await weights.end()
        assert is_running(next_entry)
        assert (sleep_events, weights.requested_versions) == (["begun", "ended"], ["a1", "a1"])

    run_scenario(scenario())


def test_a_rest_that_fails_starts_the_orders_behind_it() -> None:
    async def scenario() -> None:
        weights = Weights()
        schedule = Schedule(weights.load)

        async def fail() -> None:
            await settle()
            raise Corrupt("no")

        resting = asyncio.create_task(schedule.sleep(fail))
        await asyncio.sleep(0)
        entry = schedule.enter(version("a1"))
        with pytest.raises(Corrupt):
            await resting
        await weights.end()
        assert is_running(entry)

    run_scenario(scenario())
