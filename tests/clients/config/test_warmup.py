"""A warm-up that a run does not finish is refused: its rate would never be the one of the job."""

from __future__ import annotations

import pytest

from clients.config.sft import SFTJob

JOB = {"student": {"model": "s"}, "data": {"path": "d.jsonl"}, "method": {"type": "sft"}}


def test_a_warmup_that_is_longer_than_the_run() -> None:
    with pytest.raises(ValueError, match="is more than max_steps = 10; lower it"):
        SFTJob.model_validate(JOB | {"max_steps": 10, "train": {"warmup_steps": 11}})
    SFTJob.model_validate(JOB | {"max_steps": 10, "train": {"warmup_steps": 10}})
