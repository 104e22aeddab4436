"""Rollouts of a checkpoint after a resume: they are answers to the prompts that they get."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from student_trainer.data.prompts import Prompt
from student_trainer.parallel.collectives import make_accelerator
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import SingleTurnRollouts
from student_trainer.rollout_client.order import SamplingSettings, WeightsVersion
from student_trainer.rollout_client.rollouts_ahead import PromptsOfStep, RolloutsAhead
from student_trainer.rollout_service.service import RolloutServicer
from student_trainer.teachers.source import NoTeacher
from tests.student_trainer import tiny
from tests.student_trainer.rollout_service.scripted_service import ScriptedEngine, serve_on_thread
from tests.student_trainer.saving import LIMIT

LAG, PER_STEP = 2, 4


class Versions:
    """Versions of weights without files: the scripted engine loads none."""

    newest: WeightsVersion

    def __init__(self, path: Path) -> None:
        self._path = path

    def publish(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        self.newest = WeightsVersion("run/1", number, self._path, "drain")
        return self.newest

    def delete_before(self, number: int) -> None: ...

    def close(self) -> None: ...


@contextmanager
def rollouts_ahead(path: Path) -> Iterator[tuple[RolloutsAhead, ScriptedEngine]]:
    engine, versions = ScriptedEngine(), Versions(path)
    settings = SamplingSettings(1, 1.0, 0, 0, 2, 100)
    with (
        serve_on_thread(RolloutServicer(engine)) as address,
        EngineClient([address]) as client,
    ):
        rollouts = SingleTurnRollouts(client, settings, lambda: versions.newest)
        yield (
            RolloutsAhead(
                make_accelerator(LIMIT),
                client,
                versions,
                NoTeacher(),
                rollouts,
                lag=LAG,
                last_step=12,
            ),
            engine,
        )


def prompts_with(first: int) -> PromptsOfStep:
    """Return the prompts of a data set: those with an odd number begin with `first`."""

    def prompts_of_step(step: int) -> tuple[list[Prompt], list[int]]:
        numbers = [step * PER_STEP + place for place in range(PER_STEP)]
        return [tiny.prompt(first if n % 2 else 1, n % 7, 3) for n in numbers], numbers

    return prompts_of_step


def tokens_of(ahead: RolloutsAhead, step: int, data: PromptsOfStep) -> list[Tensor]:
    return [pending.sequence.token_ids for pending in ahead.of_step(step, data)]


@pytest.mark.parametrize("first", [2, 5], ids=["same data", "changed data"])
def test_stored_rollouts_are_used_for_their_own_prompts(
    tmp_path: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    with rollouts_ahead(tmp_path) as (ahead, _):
        ahead.of_step(1, prompts_with(2))
        for name, data in ahead.later_files(1)(threading.Event()).items():
            (tmp_path / name).write_bytes(data)
    data = prompts_with(first)
    with rollouts_ahead(tmp_path) as (resumed, _):
        resumed.restore(tmp_path)
        for step in range(2, 2 + LAG):
            prompts, _ = data(step)
            for prompt, tokens in zip(prompts, tokens_of(resumed, step, data), strict=True):
                assert tokens[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    changed = PER_STEP // 2 if first == 5 else 0
    messages = [m for m in caplog.messages if "the data have changed" in m]
    assert len(messages) == (LAG if changed else 0)
    assert all(f"{changed} stored answers" in message for message in messages)
