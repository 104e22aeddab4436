"""Rollouts of an external engine, sampled up to `lag` steps before the step that uses them.

Step n uses the rollouts of order n. Before step n, the weights of step n - 1 are published, and
order n + lag is sent to the engine with this version:

    publish version n - 1 -> send order n + lag -> wait for order n -> step n -> version n

So order m is always sampled with version max(0, m - 1 - lag), however fast the trainer and the
engine are. With `in_flight = "drain"`, a step depends only on the job. No rollout is dropped. The
teacher scores each rollout as soon as it is sampled.

A checkpoint of step n contains the rollouts of orders n + 1 to n + lag, because the weights that
sampled them no longer exist when the run resumes.

With an environment and `drain`, all turns of a rollout are sampled with the version of its order.
With other values of `in_flight`, a turn is sampled with the newest version.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from protos.errors import DistillError
from protos.rows.codec import RowBlock
from student_trainer.checkpoints.saver import LaterFiles
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.rollout_client.engine_client import EngineClient
from student_trainer.rollout_client.engine_rollouts import EngineRollouts
from student_trainer.rollout_client.order import WeightsVersion
from student_trainer.rollout_client.stored_sequences import (
    encode_rollouts,
    file_name,
    read_rollouts,
)
from student_trainer.rollout_client.weight_channel import WeightChannel
from student_trainer.teachers.scored_rollouts import PromptsOfStep
from student_trainer.teachers.source import PendingRows, TeacherSource, resolved

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # between two checks whether an order is complete


class RolloutsAhead:
    """Sends orders to the engine, and returns the rollouts of each step with their rows."""

    def __init__(
        self,
        accelerator: Accelerator,
        client: EngineClient,
        channel: WeightChannel,
        teacher: TeacherSource,
        rollouts: EngineRollouts,
        *,
        lag: int,
        last_step: int,
        sleeps: bool = False,
    ) -> None:
        """Set up the rollouts. Nothing is sent.

        - teacher: scores the rollouts.
        - rollouts: samples the rollouts with the services of `client`.
        - lag: maximum age of the weights in steps.
        - last_step: the last step for which an order is sent.
        - sleeps: True if the services and the trainer use the same GPUs in turn.
        """
        self._accelerator = accelerator
        self._client = client
        self._channel = channel
        self._teacher = teacher
        self._rollouts = rollouts
        self._lag = lag
        self._last_step = last_step
        self._sleeps = sleeps
        self._orders: dict[int, _RunningOrder] = {}
        self._stored_rollouts: dict[int, Rollout] = {}
        self._newest: WeightsVersion  # of training; set before the first order

    def of_step(self, step: int, prompts_of_step: PromptsOfStep) -> list[PendingRows]:
        """Collective. Return this process's rollouts of `step` (from 1) and request their rows.

        `prompts_of_step`: a function that returns this process's prompts and rollout numbers of a
        step. The orders of steps up to `step + lag` are sent. An error of the engine or of the
        teacher is raised on all ranks.
        """
        self._channel.delete_before(step - 1 - self._lag)
        # Keep the order of this step until the next step: if this one fails, the checkpoint of the
        # previous step needs the order.
        self._orders = {
            order_step: order for order_step, order in self._orders.items() if order_step >= step
        }
        order_steps = range(step, min(step + self._lag, self._last_step) + 1)
        new_steps = [order_step for order_step in order_steps if order_step not in self._orders]
        if new_steps:
            weights = self._newest = self._channel.publish(step - 1)
            self._make_room()
            raise_on_all_ranks(
                self._accelerator,
                lambda: self._orders.update(
                    {
                        order_step: self._start_order(weights, *prompts_of_step(order_step))
                        for order_step in new_steps
                    }
                ),
            )
        order = self._orders[step]
        return raise_on_all_ranks(self._accelerator, lambda: self._await_rows(order))

    def before_learning(self) -> None:
        """Collective. Free the memory of engines that share the trainer's GPUs."""
        if self._sleeps:
            main = self._accelerator.is_main_process
            raise_on_all_ranks(self._accelerator, self._client.sleep if main else lambda: None)

    def restore(self, checkpoint: Path) -> None:
        """Load the rollouts of later steps from a checkpoint, so that they are not sampled again.

        If the data have changed, `of_step` samples new rollouts for the prompts that changed.
        """
        self._stored_rollouts = read_rollouts(checkpoint)

    def later_files(self, step: int) -> LaterFiles:
        """Return a function that returns the files with the rollouts of the steps after `step`.

        They are part of the checkpoint of `step`; see `LaterFiles`.
        """
        part = self._accelerator.process_index
        orders = [order for order_step, order in self._orders.items() if order_step > step]

        def files(stop: threading.Event) -> Mapping[str, bytes]:
            rollouts: dict[int, Rollout] = {}
            for order in orders:
                rollouts |= order.rollouts(stop)
            return {file_name(part): encode_rollouts(rollouts)} if rollouts else {}

        return files

    def publish(self, step: int, *, anchor: bool = False) -> None:
        """Collective. Publish the current weights, version `step`, to the engine for an evaluation.

        `anchor`: True if the student currently has the anchor's weights.
        """
        self._channel.publish(step, anchor=anchor)
        self._make_room()

    def close(self) -> None:
        """Cancel the running orders, and delete all versions of the weights. Not collective."""
        self._client.close()
        self._channel.close()

    def metrics(self, step: int, pending_rows: Sequence[PendingRows]) -> dict[str, Tensor]:
        """Return the metrics of the rollouts of `step`: the mean age of their weights in steps."""
        lags = [
            (step - 1 - version, tokens)
            for item in pending_rows
            for version, tokens in cast(Rollout, item.sequence).versions
        ]
        total = sum(lag * tokens for lag, tokens in lags)
        count = sum(tokens for _, tokens in lags)
        return {"rollout/lag": torch.tensor([total, count], dtype=torch.float64)}

    def _make_room(self) -> None:
        """Collective. Free the cached GPU memory, because the next order wakes the engines."""
        if self._sleeps:
            torch.cuda.empty_cache()
            self._accelerator.wait_for_everyone()

    def _start_order(
        self, weights: WeightsVersion, prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> _RunningOrder:
        """Start an order for the prompts that have no rollout from the checkpoint."""
        order = _RunningOrder(prompts, numbers, self._teacher)
        missing, changed = [], 0
        for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
            stored_rollout = self._stored_rollouts.pop(number, None)
            if stored_rollout is not None and _answers(stored_rollout, prompt):
                order.take(index, _add_prompt_fields(stored_rollout, prompt))
            else:
                missing.append(index)
                changed += stored_rollout is not None
        if changed:
            log.warning(
                "the data have changed since the checkpoint: %d stored answers to other prompts"
                " are left out, and answers to the new ones sampled",
                changed,
            )
        if missing:
            drain = weights.in_flight == "drain"
            sampling = self._rollouts.order(
                [prompts[index] for index in missing],
                [numbers[index] for index in missing],
                lambda: weights if drain else self._newest,
            )
            order.collect(sampling, missing)
        return order

    def _await_rows(self, order: _RunningOrder) -> list[PendingRows]:
        order.completion.result()
        return [
            PendingRows(rollout, self._teacher.score(rollout) if rows is None else rows)
            for rollout, rows in order.scored_rollouts
        ]


def _answers(stored_rollout: Rollout, prompt: Prompt) -> bool:
    """Return True if the stored rollout is an answer to `prompt`."""
    return np.array_equal(stored_rollout.token_ids[: stored_rollout.start].numpy(), prompt.ids)


def _add_prompt_fields(stored_rollout: Rollout, prompt: Prompt) -> Rollout:
    """Return the stored rollout with the fields of its prompt that are not stored."""
    return replace(
        stored_rollout,
        answer=prompt.answer,
        teacher=prompt.teacher,
        fields=prompt.fields,
        text=prompt.text,
        weight=prompt.weight,
    )


class _RunningOrder:
    """An order of this process: the rollouts that have arrived, and the requests for their rows."""

    def __init__(
        self, prompts: Sequence[Prompt], numbers: Sequence[int], teacher: TeacherSource
    ) -> None:
        self.completion: Future[None] = resolved(None)
        self._prompts = prompts
        self._numbers = numbers
        self._teacher = teacher
        self._scored_rollouts: dict[int, tuple[Rollout, Future[RowBlock] | None]] = {}

    @property
    def scored_rollouts(self) -> list[tuple[Rollout, Future[RowBlock] | None]]:
        """The rollouts in the order of the prompts, each with the request for its rows.

        The request is None if the teacher does not allow requests at any time.
        """
        return [self._scored_rollouts[index] for index in range(len(self._prompts))]

    def take(self, index: int, rollout: Rollout) -> None:
        """Add a rollout. If the teacher allows requests at any time, request its rows now."""
        rows: Future[RowBlock] | None = None
        if self._teacher.any_time:
            try:
                rows = self._teacher.score(rollout)
            except DistillError as error:
                rows = Future()
                rows.set_exception(error)
        self._scored_rollouts[index] = rollout, rows

    def collect(self, sampling: Iterator[tuple[int, Rollout]], indices: Sequence[int]) -> None:
        """Start a thread that adds each rollout of `sampling` when it arrives.

        `indices[i]`: index of the prompt of rollout i among this order's prompts. The future
        `completion` is done at the end of the thread, with the thread's error if there is one.
        """
        self.completion = Future()

        def take_rollouts() -> None:
            try:
                for number, rollout in sampling:
                    self.take(indices[number], rollout)
            except Exception as error:  # noqa: BLE001 (the future raises it)
                self.completion.set_exception(error)
            else:
                self.completion.set_result(None)

        threading.Thread(target=take_rollouts, name="rollouts", daemon=True).start()

    def rollouts(self, stop: threading.Event) -> dict[int, Rollout]:
        """Wait for the rollouts, and return them by rollout number; {} if `stop` is set before.

        If the engine fails, the result has only the rollouts that arrived. A resumed run samples
        the others again.
        """
        while not self.completion.done():
            if stop.wait(_POLL_SECONDS):
                return {}
        return {
            self._numbers[index]: rollout
            for index, (rollout, _) in sorted(self._scored_rollouts.items())
        }
