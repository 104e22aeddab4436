"""FSDP2 over gloo: shares of the weights in each process, and the same run as in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from clients.run_directory import RunDirectory
from tests.end_to_end.conftest import Once
from tests.end_to_end.processes import finish, metrics_of, new_run
from tests.end_to_end.test_two_processes import assert_close

if TYPE_CHECKING:
    from tests.trainer.tiny import Material

# 7 answers for 2 or 4 processes, and a few tokens in a micro-batch: nobody has as much as another.
UNEVEN = {
    "max_steps": 8,
    "train__prompts_per_step": 7,
    "eval__every": 4,
    "eval__prompts": 5,
    "student__gradient_checkpointing": True,
}
SHARDED = {**UNEVEN, "train__processes": 2, "train__sharding": "fsdp2"}


@pytest.fixture(scope="module")
def alone(material: Material, teacher: str, once: Once) -> RunDirectory:
    """One process, undisturbed."""
    return made(once, "alone", material, teacher, **UNEVEN)


@pytest.fixture(scope="module")
def sharded(material: Material, teacher: str, once: Once) -> RunDirectory:
    """Two processes, undisturbed."""
    return made(once, "sharded", material, teacher, **SHARDED)


def made(once: Once, name: str, material: Material, teacher: str, **changes: Any) -> RunDirectory:
    from tests.trainer.tiny import job

    config = job(material, teacher, **changes)
    return RunDirectory(once(name, lambda path: finish(new_run(path, config))))


@pytest.mark.slow
def test_the_same_curve_as_one_process(alone: RunDirectory, sharded: RunDirectory) -> None:
    assert_close(metrics_of(sharded), metrics_of(alone))
