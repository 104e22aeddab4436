"""`python -m teacher_service` whose HTTP clients have a second of patience, and two connections."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from teacher_service.__main__ import main
from teacher_service.http import front

PATIENCE = 1.0
CONNECTIONS = 8

if __name__ == "__main__":
    limits = replace(front.LIMITS, patience=PATIENCE, connections=CONNECTIONS)
    impatient: Any = partial(front.HttpFront, limits=limits)
    front.HttpFront = impatient  # type: ignore[misc]
    main()
