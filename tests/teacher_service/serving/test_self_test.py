"""The self-test refuses every engine that is wrong in the way it looks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from clients.teacher.query import ScoreQuery
from protos.errors import DistillError, WrongState
from protos.rows.codec import RowBlock
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.serving.self_test import run_self_test

Wrong = Callable[[RowBlock, int, int], RowBlock]


class WrongEngine(FakeEngine):
    """Right, but for what `wrong` makes of a block in the n-th batch of m sequences."""

    def __init__(self, wrong: Wrong, **facts: object) -> None:
        super().__init__(FakeSettings(vocab=64))
        self.info = replace(self.info, **facts)  # type: ignore[arg-type]
        self._wrong = wrong
        self._batches = 0

    def score(self, queries: Sequence[ScoreQuery]) -> list[RowBlock | DistillError]:
        self._batches += 1
        blocks = [block for block in super().score(queries) if isinstance(block, RowBlock)]
        return [self._wrong(block, self._batches, len(queries)) for block in blocks]


def shifted(block: RowBlock, by: float) -> RowBlock:
    return replace(
        block,
        head_logprobs=block.head_logprobs + np.float32(by),
        token_logprobs=block.token_logprobs + np.float32(by),
    )


def test_right_engines() -> None:
    assert run_self_test(FakeEngine(FakeSettings())) == 0
    assert run_self_test(FakeEngine(FakeSettings(vocab=1, max_length=2))) == 0
    noisy = WrongEngine(
        lambda block, batch, _: shifted(block, 1e-4 * batch), batch_invariant=False, dtype="float32"
    )
    assert 1e-4 < run_self_test(noisy) < 3e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda block, batch, _: shifted(block, 1e-6 * batch), "scored twice"),
        (lambda block, _, size: shifted(block, 1e-5 * size), "scored in a batch"),
        (lambda block, *_: shifted(block, 1e-5 * len(block)), "scored with other tokens after it"),
        (lambda block, *_: replace(block, token_logprobs=block.token_logprobs[::-1]), "as a head"),
        (
            lambda block, *_: replace(block, tail_logmass=block.tail_logmass + np.float32(0.01)),
            "sum",
        ),
        (lambda block, *_: shifted(block, -0.002), "sum"),
        (lambda block, *_: shifted(block, float("nan")), "scored twice"),
    ],
)
def test_wrong_engines(wrong: Wrong, message: str) -> None:
    with pytest.raises(WrongState, match=message):
        run_self_test(WrongEngine(wrong))
