"""A push of weights on the side of the rollout service; see `rollout_client/push/pusher.py`."""

from __future__ import annotations

import asyncio

from student_trainer.rollout_client.push.group import Seat
from student_trainer.rollout_client.push.stream import WeightsOffer
from student_trainer.rollout_service.schedule import LoadWithdrawn


class IncomingPush:
    """A push that a trainer has offered; connects its gRPC call with the schedule."""

    def __init__(self, offer: WeightsOffer) -> None:
        self.offer = offer
        self.load_requested = asyncio.Event()  # set when the weights may be loaded
        self._seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()

    async def wait_for_seat(self) -> Seat:
        """Wait until the trainer sends the seat, and return it. Raises LoadWithdrawn."""
        self.load_requested.set()
        return await self._seat

    def start(self, wait_for_seat: Seat) -> None:
        """Let the engine join the group and receive."""
        if not self._seat.done():
            self._seat.set_result(wait_for_seat)

    def withdraw(self) -> None:
        """End the push, unless it has started."""
        if not self._seat.done():
            self._seat.set_exception(LoadWithdrawn("the trainer has withdrawn a push"))
            self._seat.exception()  # marks the error as retrieved, if nobody waits for the seat
