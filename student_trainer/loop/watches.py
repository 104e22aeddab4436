"""Watches, which log warnings of a run: truncated answers, zero gradients, equal rewards, an
unstable anchor, and a lost head mass.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping

from clients.config.kinds import AnyTraining
from clients.config.rl import RLJob
from clients.runs.metrics_file import Point
from student_trainer.teachers.anchor import Anchor

log = logging.getLogger(__name__)

_STEPS = 5  # one step may be chance: with few prompts, all of them easy or hard
_FLAT = "reward/flat_groups"

_MASS = "topk/student_mass"
_CUT_SHARE = 0.2  # the share of cut answers, in several steps


class RewardWatch:
    """Logs one warning if, in several consecutive steps, each group of answers has equal rewards.

    The advantages of such a step are 0, and so is its policy gradient. The forward and backward
    passes of the step still run, to measure the entropy, the ratio and the KLs.
    """

    def __init__(self) -> None:
        self._flat_since: int | None = None
        self._last_flat_step = 0
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metric reward/flat_groups of `step`."""
        if metrics.get(_FLAT) != 1.0:
            self._flat_since = None
            return
        self._last_flat_step = step
        if self._flat_since is None:
            self._flat_since = step
        if step - self._flat_since + 1 >= _STEPS and not self._warned:
            self._warned = True
            log.warning(
                "step %d: for %d steps, all answers to each prompt have had equal rewards, so the "
                "policy gradient is zero: check the reward on the samples, choose prompts that the "
                "student sometimes gets right, or raise method.rollouts_per_prompt",
                step,
                _STEPS,
            )

    @property
    def note(self) -> str:
        """The text about the fault that the phase of the job shows; "" if there is no fault."""
        if self._flat_since is None or self._last_flat_step - self._flat_since + 1 < _STEPS:
            return ""
        return f"all rewards equal since step {self._flat_since}"


def contraction(
    *, tau: float, update_period: int, learning_rate: float, beta: float, curvature: float
) -> float:
    """Return the factor by which the gap between student and anchor changes in one anchor period.

    The factor is tau |1 - alpha beta lambda|^P. Let theta be the student, phi the anchor, and d =
    theta - phi the gap. While the gap is small, it follows

        d <- (1 - alpha beta lambda) d + alpha g     with each update of the student
        d <- tau d                                   with each update of the anchor, every P updates

    alpha is the learning rate, beta is the weight of the KL, lambda is the curvature of the KL, and
    g is the rest of the gradient. The gap is stable if the factor is below 1.
    """
    return float(tau * abs(1 - learning_rate * beta * curvature) ** update_period)


class StabilityWatch:
    """Logs one warning if the gap between student and anchor may be unstable; see `contraction`.

    The factor is a rough estimate from the metrics of a single step. The curvature lambda is
    measured along the gap d: 2 KL / |d|^2. The learning rate alpha of the estimate is an upper
    bound of the effective rate of AdamW: lr sqrt(n) / |gradient| for n weights.
    """

    note = ""  # nothing for the phase of the job

    def __init__(self, config: RLJob, anchor: Anchor) -> None:
        """Collective. Store the settings, and measure the norm of the anchor."""
        self._tau, self._period = config.anchor.tau, config.anchor.update_period
        self._beta = config.method.beta
        self._anchor_norm, self._sqrt_elements = anchor.size(), math.sqrt(anchor.elements)
        self._version = float(anchor.version)
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of `step`, which must include anchor/gap, anchor/version, grad_norm and
        lr.
        """
        distance = metrics["anchor/gap"] * self._anchor_norm
        if metrics["anchor/version"] != self._version:
            # The KL was measured before the anchor moved; the move multiplied the gap by tau.
            self._version = metrics["anchor/version"]
            distance = distance / self._tau if self._tau else 0.0
        gradient = metrics["grad_norm"]
        if self._warned or not (distance and gradient):
            return
        gap_factor = contraction(
            tau=self._tau,
            update_period=self._period,
            learning_rate=metrics["lr"] * self._sqrt_elements / gradient,
            beta=self._beta,
            curvature=2 * max(metrics.get("kl/anchor", 0.0), 0.0) / distance**2,
        )
        if gap_factor >= 1:
            self._warned = True
            log.warning(
                "step %d: the KL to the anchor may be unstable: tau |1 - alpha beta lambda|^P is "
                "about %.2g and should be below 1; lower method.beta or train.learning_rate",
                step,
                gap_factor,
            )


class HeadWatch:
    """Logs one warning if the student's probability of the head ids falls below half of its first
    value.

    Each attempt logs the warning once. The log of a resumed run therefore contains the warning too.
    """

    note = ""  # nothing for the phase of the job

    def __init__(self, history: Iterable[Point]) -> None:
        """Read the first value of topk/student_mass from `history`, the metrics before this
        attempt.
        """
        masses = (point.metrics.get(_MASS) for point in history)
        self._reference_mass = next((mass for mass in masses if mass is not None), None)
        self._warned = False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metric topk/student_mass of `step`. Does nothing if the metric is missing."""
        mass = metrics.get(_MASS)
        if mass is None or not math.isfinite(mass) or self._warned:
            return
        if self._reference_mass is None:
            self._reference_mass = mass
        if mass < self._reference_mass / 2:
            self._warned = True
            log.warning(
                "step %d: the head holds %.2f of the student's probability, at the start %.2f: a"
                " KL over the head alone can move probability out of the head; raise top_k, or"
                " use the default tail",
                step,
                mass,
                self._reference_mass,
            )


class LearningWatch:
    """Logs one warning if many answers of several steps are truncated, and one if their gradients
    are 0.

    A truncated answer has no end token from which the student could learn to stop. A gradient is 0
    if no token is learned, because all tokens are masked or have weight 0. It is also 0 if all
    rewards of each group are equal.
    """

    def __init__(self, config: AnyTraining) -> None:
        self._limit = config.method.max_new_tokens
        self._steps = min(_STEPS, config.max_steps)
        self._cut_shares = deque[float](maxlen=self._steps)
        self._gradients = deque[float](maxlen=self._steps)
        self._warned = set[str]()

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics length/truncated and grad_norm of `step`."""
        self._cut_shares.append(metrics.get("length/truncated", 0.0))
        is_flat = metrics.get(_FLAT) == 1  # RewardWatch logs this case
        self._gradients.append(1.0 if is_flat else metrics["grad_norm"])
        if self._cut_share > _CUT_SHARE:
            self._warn(
                "cut",
                f"step {step}: {self._cut_share:.0%} of the answers of {self._steps} steps are"
                f" cut at method.max_new_tokens = {self._limit}: raise the value, or check that"
                f" the student"
                " writes an end token (distill preview shows which tokens end an answer)",
            )
        if self._is_idle:
            self._warn(
                "idle",
                f"step {step}: the gradients of {self._steps} steps are zero, so nothing is"
                " learned: all tokens are masked, or have the weight 0, or have no advantage",
            )

    @property
    def note(self) -> str:
        """The text about the faults that the phase of the job shows; "" if there is none."""
        notes = [f"{self._cut_share:.0%} of answers cut"] if self._cut_share > _CUT_SHARE else []
        return ", ".join(notes + ["nothing learned: zero gradients"] * self._is_idle)

    @property
    def _cut_share(self) -> float:
        """The mean share of truncated answers in the last steps; 0 before enough steps are done."""
        is_full = len(self._cut_shares) == self._steps
        return sum(self._cut_shares) / self._steps if is_full else 0.0

    @property
    def _is_idle(self) -> bool:
        return len(self._gradients) == self._steps and not any(self._gradients)

    def _warn(self, kind: str, sentence: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", sentence)
