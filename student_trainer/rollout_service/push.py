"""A push of weights as the rollout service sees it; see `rollout_client/push/pusher.py`."""

from __future__ import annotations

import asyncio

from student_trainer.rollout_client.push.group import Seat
from student_trainer.rollout_client.push.stream import WeightsOffer
from student_trainer.rollout_service.schedule import Withdrawn


class IncomingPush:
    """A push that a trainer has offered, between its call and the schedule."""

    def __init__(self, offer: WeightsOffer) -> None:
        self.offer = offer
        self.wanted = asyncio.Event()  # the weights may be loaded now
        self._seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()

    async def seat(self) -> Seat:
        """Wait until the trainer sends; return the seat. Raises Withdrawn if it gives up."""
        self.wanted.set()
        return await self._seat

    def start(self, seat: Seat) -> None:
        """Let the engine join the group and receive."""
        if not self._seat.done():
            self._seat.set_result(seat)

    def withdraw(self) -> None:
        """End the push, unless it has started."""
        if not self._seat.done():
            self._seat.set_exception(Withdrawn("the trainer has withdrawn a push"))
            self._seat.exception()  # nobody may be waiting for it
