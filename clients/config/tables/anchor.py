"""The table `anchor` of an RL job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from clients.config.tables.common import Count, Table


class AnchorConfig(Table):
    """The anchor: a moving average of the student's weights, for the KL (EMA-PG, 2602.04417)."""

    tau: Annotated[float, Field(ge=0, le=1)] = 0.95
    """anchor = tau * anchor + (1 - tau) * student. 1 keeps the initial student as the anchor."""
    update_period: Count = 10
    """Optimizer updates between two updates of the anchor."""
    context: str | None = None
    """Text that only the anchor reads, before the prompt; may contain {columns} of the data."""
