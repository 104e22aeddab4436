"""Schedules the orders of a rollout service, and the loads of the weights that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protos.errors import Overloaded, Unavailable
from student_trainer.rollout_client.order import WeightsVersion

MAX_WAITING_ORDERS = 256


class ScheduleEntry:
    """An order in the schedule.

    - weights: the version of the weights that the order needs.
    - sampling: the task that samples the order. It is cancelled if the weights are lost.
    - error: the error that ended the order, or None.
    """

    def __init__(self, weights: WeightsVersion) -> None:
        self.weights = weights
        self.sampling: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self._started = asyncio.Event()

    async def wait_until_started(self) -> None:
        """Wait until the order may be sampled. If loading its weights failed, raise that error."""
        await self._started.wait()
        if self.error is not None:
            raise self.error

    def start(self) -> None:
        """Allow the sampling of this order to begin: `wait_until_started` returns."""
        self._started.set()

    def fail(self, error: Exception) -> None:
        """End the order with an error, whether it waits or runs."""
        self.error = error
        if self._started.is_set() and self.sampling is not None:
            self.sampling.cancel()
        self._started.set()


class Schedule:
    """Decides when weights are loaded and when orders start. For use in one event loop.

    - An order of the loaded version starts at once, unless an older order of another lineage waits.
    - An order of another version waits until no order runs. Then the weights of the oldest waiting
      order are loaded.
    - If this order has the `in_flight` value recompute or keep, and its version is a newer version
      of the loaded lineage, its weights are loaded while orders run.
    - If a load fails, the orders that wait for this load fail. The running orders also fail,
      because their weights are lost. A later order of the same version loads the weights again.
    """

    def __init__(
        self,
        load: Callable[[WeightsVersion], Awaitable[None]],
        *,
        max_waiting: int = MAX_WAITING_ORDERS,
    ) -> None:
        self._load_weights = load
        self._max_waiting = max_waiting
        self._waiting_entries: list[ScheduleEntry] = []  # the oldest first
        self._running_entries: set[ScheduleEntry] = set()
        self._loading: asyncio.Task[None] | None = None
        self._draining = False
        self.loaded_version: WeightsVersion | None = None
        self.loads = 0

    @property
    def running_count(self) -> int:
        """Number of running orders."""
        return len(self._running_entries)

    @property
    def waiting_count(self) -> int:
        """Number of waiting orders."""
        return len(self._waiting_entries)

    def enter(self, weights: WeightsVersion) -> ScheduleEntry:
        """Add an order. Raises Overloaded if too many orders wait, Unavailable after `drain`."""
        if self._draining:
            raise _stopping_error()
        if len(self._waiting_entries) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting_entries)} orders wait at this rollout service",
                hint="retry in a second, or start another service",
            )
        entry = ScheduleEntry(weights)
        self._waiting_entries.append(entry)
        self._advance()
        return entry

    def leave(self, entry: ScheduleEntry) -> None:
        """Remove an order, whether it waits, runs or has ended. May be called twice."""
        self._running_entries.discard(entry)
        if entry in self._waiting_entries:
            self._waiting_entries.remove(entry)
        self._advance()

    def end_earlier_attempts(self, weights: WeightsVersion, error: Exception) -> None:
        """End all orders of earlier attempts of the same job with `error`.

        `weights`: the version of an order of the new attempt.
        """
        for entry in (*self._waiting_entries, *self._running_entries):
            entry_weights = entry.weights
            if entry_weights.job == weights.job and entry_weights.attempt < weights.attempt:
                if entry in self._waiting_entries:
                    self._waiting_entries.remove(entry)
                entry.fail(error)

    def drain(self) -> None:
        """Let the waiting and all later orders fail with Unavailable; running orders continue."""
        self._draining = True
        for entry in self._waiting_entries:
            entry.fail(_stopping_error())
        self._waiting_entries.clear()

    async def sleep(self, drop_weights: Callable[[], Awaitable[None]]) -> None:
        """Call `drop_weights` if no order runs or waits. No order starts during the call."""
        if self._loading is not None or self._running_entries or self._waiting_entries:
            return
        self.loaded_version = None
        # A task, so that the call continues if the caller is cancelled.
        self._loading = asyncio.create_task(self._drop_weights(drop_weights))
        await asyncio.shield(self._loading)

    async def _drop_weights(self, drop_weights: Callable[[], Awaitable[None]]) -> None:
        try:
            await drop_weights()
        finally:
            self._loading = None
            self._advance()

    def _advance(self) -> None:
        """Start the orders that may start now. Then load weights if a waiting order needs them."""
        if self._loading is not None:
            return
        for entry in tuple(self._waiting_entries):
            if self._is_loaded(entry.weights):
                self._waiting_entries.remove(entry)
                self._running_entries.add(entry)
                entry.start()
            elif not self._is_of_loaded_lineage(entry.weights):
                break
        version = self._next_version()
        if version is not None:
            self._loading = asyncio.create_task(self._load_version(version))

    def _next_version(self) -> WeightsVersion | None:
        """Return the version of the weights to load now; None if no load may begin."""
        if self._waiting_entries and not self._running_entries:
            return self._waiting_entries[0].weights
        for entry in self._waiting_entries:
            weights = entry.weights
            if self.loaded_version is None or not self._is_of_loaded_lineage(weights):
                return None
            if weights.in_flight != "drain" and weights.number > self.loaded_version.number:
                return weights
        return None

    async def _load_version(self, weights: WeightsVersion) -> None:
        try:
            await self._load_weights(weights)
            self.loaded_version = weights
            self.loads += 1
        except Exception as error:  # noqa: BLE001 (the waiting orders fail with it)
            self.loaded_version = None
            waiting_entries = [
                entry for entry in self._waiting_entries if _is_same_version(entry.weights, weights)
            ]
            self._waiting_entries = [
                entry for entry in self._waiting_entries if entry not in waiting_entries
            ]
            for entry in (*waiting_entries, *self._running_entries):
                entry.fail(error)
        finally:
            self._loading = None
        self._advance()

    def _is_loaded(self, weights: WeightsVersion) -> bool:
        return self.loaded_version is not None and _is_same_version(weights, self.loaded_version)

    def _is_of_loaded_lineage(self, weights: WeightsVersion) -> bool:
        return self.loaded_version is not None and weights.lineage == self.loaded_version.lineage


def _is_same_version(first: WeightsVersion, second: WeightsVersion) -> bool:
    return (first.lineage, first.number) == (second.lineage, second.number)


def _stopping_error() -> Unavailable:
    return Unavailable(
        "this rollout service is stopping",
        hint="send the order to another service, or start this service again",
    )
