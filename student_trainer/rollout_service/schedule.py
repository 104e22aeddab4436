"""Which orders may be sampled now, and when the weights of which version are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protos.errors import Overloaded, Unavailable
from student_trainer.rollout_client.order import WeightsVersion

MAX_WAITING_ORDERS = 256


class Withdrawn(Unavailable):
    """A load has not begun: the weights are as before."""


class Place:
    """An order in the schedule.

    sampling: the task that samples it; cancelled if the weights are lost. error: why they are lost.
    """

    def __init__(self, weights: WeightsVersion) -> None:
        self.weights = weights
        self.sampling: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self._started = asyncio.Event()

    async def started(self) -> None:
        """Wait until the order may be sampled. Raises the error of the load of its weights."""
        await self._started.wait()
        if self.error is not None:
            raise self.error

    def start(self) -> None:
        """Let the order be sampled."""
        self._started.set()

    def fail(self, error: Exception) -> None:
        """End the order with an error, whether it waits or is sampled."""
        self.error = error
        if self._started.is_set() and self.sampling is not None:
            self.sampling.cancel()
        self._started.set()


class Schedule:
    """Orders the loads of weights and the starts of orders; use it from one event loop.

    Orders of the loaded version start at once, unless an older order of another lineage waits. An
    order of another version waits until no order runs; then the weights of the oldest waiting order
    are loaded. If that order allows it (`in_flight` recompute or keep), and its version is a newer
    one of the loaded lineage, its weights are loaded while orders run.

    A load that fails, fails the orders that wait for it, and those that run: they have lost their
    weights, unless it was Withdrawn. A later order of the same version loads it again.
    """

    def __init__(
        self,
        load: Callable[[WeightsVersion], Awaitable[None]],
        *,
        max_waiting: int = MAX_WAITING_ORDERS,
    ) -> None:
        self._load_weights = load
        self._max_waiting = max_waiting
        self._waiting: list[Place] = []  # the oldest first
        self._running: set[Place] = set()
        self._loading: asyncio.Task[None] | None = None
        self._draining = False
        self.loaded: WeightsVersion | None = None
        self.loads = 0

    @property
    def running(self) -> int:
        """Number of orders that are sampled."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of orders that wait."""
        return len(self._waiting)

    def has(self, weights: WeightsVersion) -> bool:
        """Return whether the weights are loaded now."""
        return self._is_loaded(weights)

    def enter(self, weights: WeightsVersion) -> Place:
        """Add an order. Raises Overloaded if too many wait, Unavailable after `drain`."""
        if self._draining:
            raise _stopping()
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} orders wait at this rollout service",
                hint="retry in a second, or start another service",
            )
        place = Place(weights)
        self._waiting.append(place)
        self._advance()
        return place

    def leave(self, place: Place) -> None:
        """Remove an order, whatever its state. Calling it twice is safe."""
        self._running.discard(place)
        if place in self._waiting:
            self._waiting.remove(place)
        self._advance()

    def end_earlier(self, weights: WeightsVersion, error: Exception) -> None:
        """End the orders of earlier attempts of a job with an error."""
        for place in (*self._waiting, *self._running):
            theirs = place.weights
            if theirs.job == weights.job and theirs.attempt < weights.attempt:
                if place in self._waiting:
                    self._waiting.remove(place)
                place.fail(error)

    def drain(self) -> None:
        """Fail the waiting orders and all later ones with Unavailable; the others go on."""
        self._draining = True
        for place in self._waiting:
            place.fail(_stopping())
        self._waiting.clear()

    async def rest(self, drop_weights: Callable[[], Awaitable[None]]) -> None:
        """Call `drop_weights`, unless an order runs or waits; none starts meanwhile."""
        if self._loading is not None or self._running or self._waiting:
            return
        self.loaded = None
        # A task, which goes on if the caller is cancelled.
        self._loading = asyncio.create_task(self._rest(drop_weights))
        await asyncio.shield(self._loading)

    async def _rest(self, drop_weights: Callable[[], Awaitable[None]]) -> None:
        try:
            await drop_weights()
        finally:
            self._loading = None
            self._advance()

    def _advance(self) -> None:
        """Start the orders that may start, then load weights if an order needs them now."""
        if self._loading is not None:
            return
        for place in tuple(self._waiting):
            if self._is_loaded(place.weights):
                self._waiting.remove(place)
                self._running.add(place)
                place.start()
            elif not self._is_of_loaded_lineage(place.weights):
                break
        needed = self._needed()
        if needed is not None:
            self._loading = asyncio.create_task(self._load(needed))

    def _needed(self) -> WeightsVersion | None:
        """Return the version to load now."""
        if self._waiting and not self._running:
            return self._waiting[0].weights
        for place in self._waiting:
            weights = place.weights
            if self.loaded is None or not self._is_of_loaded_lineage(weights):
                return None
            if weights.in_flight != "drain" and weights.number > self.loaded.number:
                return weights
        return None

    async def _load(self, weights: WeightsVersion) -> None:
        try:
            await self._load_weights(weights)
            self.loaded = weights
            self.loads += 1
        except Exception as error:
            untouched = isinstance(error, Withdrawn)
            if not untouched:
                self.loaded = None
            same = [place for place in self._waiting if _same(place.weights, weights)]
            self._waiting = [place for place in self._waiting if place not in same]
            for place in same if untouched else (*same, *self._running):
                place.fail(error)
        finally:
            self._loading = None
        self._advance()

    def _is_loaded(self, weights: WeightsVersion) -> bool:
        return self.loaded is not None and _same(weights, self.loaded)

    def _is_of_loaded_lineage(self, weights: WeightsVersion) -> bool:
        return self.loaded is not None and weights.lineage == self.loaded.lineage


def _same(one: WeightsVersion, other: WeightsVersion) -> bool:
    return (one.lineage, one.number) == (other.lineage, other.number)


def _stopping() -> Unavailable:
    return Unavailable(
        "this rollout service is stopping", hint="send the order to another one, or start it again"
    )
