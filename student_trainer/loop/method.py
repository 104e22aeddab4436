"""A method as the trainer sees it: what a step is made of, and what is evaluated and watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from student_trainer.critic import CriticAdvantages
from student_trainer.loop.evaluation import Evaluation
from student_trainer.loop.step import Objective, Steps
from student_trainer.rollout_client.rollouts_ahead import RolloutsAhead
from student_trainer.teachers.anchor import Anchor


class Watch(Protocol):
    """Reads the metrics of each step, and logs a warning if they show a fault."""

    @property
    def note(self) -> str:
        """The state in a few words, for the phase of the job; "" if there is nothing to say."""

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of `step`."""


@dataclass(frozen=True)
class Method:
    """What the trainer needs from a method.

    objective: the loss and the metrics of a micro-batch. steps: returns this process's sequences of
    a step. evaluation: the held-out evaluation. anchor: None if the job has no anchor. critic: None
    if advantages come from groups. facts: written to state.json of every checkpoint; an offline job
    compares the identity of its store with them when the run resumes. rollouts_ahead: None if the
    trainer's processes sample. watches: of the main process.
    """

    objective: Objective
    steps: Steps
    evaluation: Evaluation
    anchor: Anchor | None = None
    critic: CriticAdvantages | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    rollouts_ahead: RolloutsAhead | None = None
    watches: Sequence[Watch] = ()
