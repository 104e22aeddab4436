"""Rollouts of an engine outside the trainer, sampled up to `lag` steps before they are learned.

Step n learns from the rollouts of order n. Before it, the weights of step n - 1 are published, and
order n + lag is given to the engine with that version:

    version n - 1 published -> order n + lag given -> order n awaited -> step n -> version n

So order m is sampled with version max(0, m - 1 - lag), whatever the speed of trainer and engine: a
step is a pure function of the job (`in_flight = "drain"`). No rollout is dropped. The teacher
scores each rollout as soon as it is sampled.

A checkpoint of step n has the rollouts of orders n + 1 to n + lag: the weights that sampled them
are gone when the run resumes.

With an environment, all turns of a rollout are sampled with the version of its order; with another
`in_flight`, a turn is sampled with the newest version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from protos.errors import DistillError
from protos.rows.codec import RowBlock
from student_trainer.data.prompts import Prompt
from student_trainer.data.rollout import Rollout
from student_trainer.parallel.collectives import max_over_ranks, raise_on_all_ranks
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import EngineRollouts
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.stored_sequences import encoded, file_name, read
from student_trainer.teachers.scored_rollouts import Asked
from student_trainer.teachers.source import PendingRows, TeacherSource, resolved

_PAUSE = 0.02  # seconds between two looks at an order
_LOOK = 0.5  # seconds between two looks at whether pushed weights are lost
# Makes this process's files of a checkpoint, by name. It waits until the orders that ran when it
# was made have ended; {} if the event is set first. For another thread than the trainer's.
LaterFiles = Callable[[threading.Event], Mapping[str, bytes]]


class WeightVersions(Protocol):
    """Writes versions of the student's weights for engines: `checkpoints/snapshots.py`."""

    def write(self, number: int, *, anchor: bool = False) -> WeightsVersion:
        """Collective. Write the current weights as version `number`, and return it.

        `anchor`: they are those of the anchor, which is in the student's place.
        """

    def push(self, number: int) -> WeightsVersion:
        """Collective. Give the engines the current weights as version `number`, and return it."""

    def restore_lost(self, version: WeightsVersion, number: int) -> WeightsVersion | None:
        """Collective. If an order lacks the pushed `version`, write the current weights for it.

        `number`: of the current weights. Returns their version, or None if no order lacks any.
        """

    def delete_before(self, number: int) -> None:
        """Delete the versions before `number`."""

    def close(self) -> None:
        """Delete all versions."""


class RolloutsAhead:
    """Gives orders to the engine, and returns the rollouts of each step with their rows."""

    def __init__(
        self,
        accelerator: Accelerator,
        client: EngineClient,
        snapshots: WeightVersions,
        teacher: TeacherSource,
        rollouts: EngineRollouts,
        *,
        lag: int,
        last_step: int,
        sleeps: bool = False,
    ) -> None:
        """Keep the parts.

        `teacher`: scores the rollouts. `rollouts`: samples them at the services of `client`.
        `last_step`: no order is given for later steps. `sleeps`: the services share the trainer's
        GPUs and take turns with it.
        """
        self._accelerator = accelerator
        self._client = client
        self._snapshots = snapshots
        self._teacher = teacher
        self._rollouts = rollouts
        self._lag = lag
        self._last_step = last_step
        self._sleeps = sleeps
        self._orders: dict[int, _Running] = {}
        self._stored: dict[int, Rollout] = {}
        self._newest: WeightsVersion  # of training; set before the first order

    def of_step(self, step: int, asked: Asked) -> list[PendingRows]:
        """Collective. Return this process's rollouts of `step` (from 1) and request their rows.

        `asked`: the prompts and rollout numbers of this process in a step. Gives the orders of
        steps up to `step + lag`. Raises the error of the engine or of the teacher on all ranks.
        """
        self._snapshots.delete_before(step - 1 - self._lag)
        # The order of this step is kept until the next one: if the step fails, the checkpoint of
        # the step before needs it.
        self._orders = {n: order for n, order in self._orders.items() if n >= step}
        ahead = range(step, min(step + self._lag, self._last_step) + 1)
        new = [later for later in ahead if later not in self._orders]
        if new:
            self._end_earlier_orders(step - 1)
            weights = self._newest = self._snapshots.push(step - 1)
            self._make_room()
            raise_on_all_ranks(
                self._accelerator,
                lambda: self._orders.update({n: self._given(weights, *asked(n)) for n in new}),
            )
        running = self._orders[step]
        self._keep_weights(running, step - 1)
        return raise_on_all_ranks(self._accelerator, lambda: self._pending(running))

    def before_learning(self) -> None:
        """Collective. Have engines that share the trainer's GPUs free their memory."""
        if self._sleeps:
            main = self._accelerator.is_main_process
            raise_on_all_ranks(self._accelerator, self._client.sleep if main else lambda: None)

    def restore(self, checkpoint: Path) -> None:
        """Take the rollouts of later steps from a checkpoint; `of_step` does not sample them."""
        self._stored = read(checkpoint)

    def later_files(self, step: int) -> LaterFiles:
        """Return a function for the checkpoint of `step`; see `LaterFiles`."""
        part = self._accelerator.process_index
        orders = [order for n, order in self._orders.items() if n > step]

        def files(stop: threading.Event) -> Mapping[str, bytes]:
            rollouts: dict[int, Rollout] = {}
            for order in orders:
                rollouts |= order.rollouts(stop)
            return {file_name(part): encoded(rollouts)} if rollouts else {}

        return files

    def publish(self, step: int, *, anchor: bool = False) -> None:
        """Collective. Make the current weights, those of `step`, the engine's for an evaluation.

        `anchor`: they are those of the anchor, which is in the student's place.
        """
        self._end_earlier_orders(step)
        self._snapshots.write(step, anchor=anchor)
        self._make_room()

    def close(self) -> None:
        """Cancel the orders that run, and delete the weights of the engines. Not collective."""
        self._client.close()
        self._snapshots.close()

    def metrics(self, step: int, written: Sequence[PendingRows]) -> dict[str, Tensor]:
        """Return the metrics of the rollouts of `step`: steps that their weights are behind."""
        behind = [
            (step - 1 - version, tokens)
            for item in written
            for version, tokens in cast(Rollout, item.sequence).versions
        ]
        total = sum(late * tokens for late, tokens in behind)
        count = sum(tokens for _, tokens in behind)
        return {"rollout/lag": torch.tensor([total, count], dtype=torch.float64)}

    def _end_earlier_orders(self, number: int) -> None:
        """Collective. With `drain`, wait for all orders before the engines load other weights.

        An engine itself waits for the orders that it has. One that is still on its way, or whose
        next turn is, would find its pushed weights gone. `number`: of the current weights.
        """
        for running in self._orders.values():
            if self._newest.in_flight == "drain":
                self._keep_weights(running, number)

    def _keep_weights(self, running: _Running, number: int) -> None:
        """Collective. Wait for an order, unless all versions are files.

        If no engine has its weights any more, write the current ones, version `number`, for its
        rest.
        """
        while self._client.pushed.newest is not None:
            wait([running.done], _LOOK)
            if not max_over_ranks(self._accelerator, int(not running.done.done())):
                return
            written = self._snapshots.restore_lost(self._newest, number)
            if written is not None:
                self._newest = written

    def _make_room(self) -> None:
        """Collective. Free cached memory of the GPUs for engines that wake with the next order."""
        if self._sleeps:
            torch.cuda.empty_cache()
            self._accelerator.wait_for_everyone()

    def _given(
        self, weights: WeightsVersion, prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> _Running:
        """Give an order for the prompts whose rollouts are not stored."""
        running = _Running(prompts, numbers, self._teacher)
        missing = []
        for index, number in enumerate(numbers):
            if number in self._stored:
                running.take(index, _of_prompt(self._stored.pop(number), prompts[index]))
            else:
                missing.append(index)
        if missing:
            drain = weights.in_flight == "drain"
            sampling = self._rollouts.order(
                [prompts[index] for index in missing],
                [numbers[index] for index in missing],
                lambda: weights if drain else self._newest,
            )
            running.collect(sampling, missing)
        return running

    def _pending(self, running: _Running) -> list[PendingRows]:
        running.done.result()
        return [
            PendingRows(rollout, self._teacher.score(rollout) if rows is None else rows)
            for rollout, rows in running.scored
        ]


def _of_prompt(stored: Rollout, prompt: Prompt) -> Rollout:
    """Return a stored rollout with what its prompt has beside its tokens."""
    return replace(
        stored,
        answer=prompt.answer,
        teacher=prompt.teacher,
        fields=prompt.fields,
        text=prompt.text,
        weight=prompt.weight,
    )


class _Running:
    """An order of this process, and what has arrived of it: rollouts, and requests of rows."""

    def __init__(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], teacher: TeacherSource
    ) -> None:
        self.done: Future[None] = resolved(None)
        self._prompts = prompts
        self._numbers = numbers
        self._teacher = teacher
        self._scored: dict[int, tuple[Rollout, Future[RowBlock] | None]] = {}

    @property
    def scored(self) -> list[tuple[Rollout, Future[RowBlock] | None]]:
        """The rollouts in the order of the prompts, with their rows, if the teacher was asked."""
        return [self._scored[index] for index in range(len(self._prompts))]

    def take(self, index: int, rollout: Rollout) -> None:
        """Take a rollout, and request its rows if the teacher allows it now."""
        rows: Future[RowBlock] | None = None
        if self._teacher.any_time:
            try:
                rows = self._teacher.score(rollout)
            except DistillError as error:
                rows = Future()
                rows.set_exception(error)
        self._scored[index] = rollout, rows

    def collect(self, sampling: Iterator[tuple[int, Rollout]], indices: Sequence[int]) -> None:
        """Take the rollouts of an order as they end, in a thread; indices[i]: of rollout i."""
        self.done = Future()

        def take_all() -> None:
            try:
                for number, rollout in sampling:
                    self.take(indices[number], rollout)
            except Exception as error:
                self.done.set_exception(error)
            else:
                self.done.set_result(None)

        threading.Thread(target=take_all, name="rollouts", daemon=True).start()

    def rollouts(self, stop: threading.Event) -> dict[int, Rollout]:
        """Wait for the rollouts, and return them by rollout number; {} if `stop` is set first.

        If the engine fails, those that it has sampled: a run that resumes samples the others anew.
        """
        while not self.done.done():
            if stop.wait(_PAUSE):
                return {}
        return {
            self._numbers[index]: rollout for index, (rollout, _) in sorted(self._scored.items())
        }
