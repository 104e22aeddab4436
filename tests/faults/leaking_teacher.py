"""`distill-teacher` that leaks a kibibyte for every sequence it scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teacher_service.engines.fake import FakeEngine

LEAK = 1024
_leaked_blocks: list[bytes] = []
_score = FakeEngine.score


def _score_and_leak(self: FakeEngine, queries: Sequence[Any]) -> list[Any]:
    _leaked_blocks.extend(bytes([number % 251]) * LEAK for number, _ in enumerate(queries))
    return list(_score(self, queries))


if __name__ == "__main__":
    FakeEngine.score = _score_and_leak  # type: ignore[method-assign]
    from teacher_service.__main__ import main

    main()
