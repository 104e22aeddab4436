"""What a run measures, and where it is written.

loss                 the objective, nats a token
kl/teacher           unbiased KL between student and teacher, nats a token
entropy              of the student over the whole vocabulary, nats a token
ratio/mean           p(y)/mu(y), of the student over the one that sampled: 1 but for rounding
topk/student_mass    probability that the student gives to the head
topk/teacher_mass    probability that the teacher gives to the head
length/mean          tokens of an answer
length/truncated     share of answers cut at max_new_tokens
grad_norm            before clipping
lr                   learning rate
tokens               scored tokens of the step, over all processes
tokens_per_sec       scored tokens a second of the step
time/step            seconds of the step; of it time/rollout, time/teacher_wait, time/optim
eval/kl              kl/teacher on held-out prompts
eval/accuracy        share of held-out answers that are right
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from clients.run_directory import RunDirectory, replace_file

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to metrics.jsonl, and to TensorBoard when asked; one line a step, never twice."""

    def __init__(
        self, run: RunDirectory, *, attempt: int, last_step: int | None, tensorboard: bool
    ) -> None:
        """Steps after `last_step`, the checkpoint that is resumed, are dropped: they come again."""
        self._attempt = attempt
        self._path = run.metrics
        kept = _lines_to(run, last_step)
        replace_file(self._path, "".join(kept))
        self._file = self._path.open("a")
        self._board = _tensorboard(run, last_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Write the finite values, warn of the others; returns what was written."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - finite.keys():
            log.warning("step %d: %s is %s and was not written", step, name, values[name])
        record = {"attempt": self._attempt, "step": step, **finite}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in finite.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        return finite

    def sync(self) -> None:
        """Before a checkpoint: one that survives a power cut must not outlive its metrics."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines_to(run: RunDirectory, last_step: int | None) -> list[str]:
    if last_step is None or not run.metrics.exists():
        return []
    kept = []
    for line in run.metrics.read_text().splitlines(keepends=True):
        # A killed process may have left the last line unfinished.
        step = _step_of(line) if line.endswith("\n") else None
        if step is None:
            log.warning("a line of metrics.jsonl is damaged and was dropped")
        elif step <= last_step:
            kept.append(line)
    return kept


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _tensorboard(run: RunDirectory, last_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge = None if last_step is None else last_step + 1
    return SummaryWriter(str(run.tensorboard), purge_step=purge)
