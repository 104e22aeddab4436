"""The tables `method` and `anchor` of a reinforcement learning job.

docs/methods.md names the source of each option, such as a paper.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from clients.config.tables.common import (
    FORMER_TAIL,
    Count,
    FittedTable,
    Table,
    Tail,
    TailDraws,
    check_tail,
)

Weight = Annotated[float, Field(ge=0)]
# Tail modes without an importance weight of the sampled token. Draws have their own log-probs.
UNWEIGHTED = ("none", "bucket", "bucket+draws")
# Tail modes of the baseline of kl_in = "reward".
BASELINES = ("bucket+draws", "bucket", FORMER_TAIL)


class RLConfig(FittedTable):
    """Reinforcement learning (GRPO), with a KL to the anchor, to a teacher, or to both."""

    fitted = frozenset({"max_prompt_tokens", "max_new_tokens"})
    type: Literal["rl"]
    """The method."""
    reward_weight: Weight = 1.0
    """Weight of the policy gradient. 0: rewards are only measured, and only the KL trains."""
    advantages: Literal["group", "group_mean", "gae"] = "group"
    """group: (reward - mean) / std of a prompt's answers. group_mean: no std. gae: a critic."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """gae: lambda of the advantage estimator. 1 uses the full reward; lower values use the critic
    more.
    """
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """gae: learning rate of the critic, a linear layer on the student's hidden states."""
    rollouts_per_prompt: Count = 8
    """Answers sampled per prompt (the group)."""
    updates_per_step: Count = 1
    """Optimizer updates per step; each uses its share of the step's prompts (PPO)."""
    epochs_per_step: Count = 1
    """Number of passes over the updates of a step, with the same rollouts (PPO)."""
    dynamic_sampling: Count = 1
    """Maximum sampling rounds per step, to replace prompts with equal rewards (DAPO). 1: off."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip of the policy ratio, at 1 - clip_low (PPO)."""
    clip_high: Weight = 0.28
    """Upper clip of the policy ratio, at 1 + clip_high (DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Additional clip of the policy ratio for negative advantages; 3 is usual."""
    ratio: Literal["token", "sequence"] = "token"
    """token: one policy ratio per token. sequence: one per answer, the geometric mean (GSPO)."""
    aggregate: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """token-mean: tokens have equal weight. seq-mean-token-mean: answers have equal weight."""
    mask_truncated: bool = False
    """Do not train on answers that are truncated at `max_new_tokens`."""
    beta: Weight = 0.001
    """Weight of the KL to the anchor; 0 keeps no anchor."""
    teacher_beta: Weight = 1.0
    """Weight of the KL to the teacher, if the job has a teacher."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is a loss term. reward: minus the sampled KL, with a baseline, adds to
    advantages.
    """
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """reverse_kl: KL(student||anchor). forward_kl: KL(anchor||student). Same for a teacher."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 32
    """Head ids per row, as `teacher.top_k` of `on_policy`. 0: rows of the sampled token only."""
    tail: Tail | None = None
    """Estimator of the KL over the tail. Default: bucket+draws; forward_kl: bucket+sampled. none,
    published and sampled are for reproduction.
    """
    tail_draws: TailDraws = 48
    """Ids per row that the student draws from its tail, for bucket+draws or kl_in = "reward"."""
    estimator: Annotated[
        Literal["k1", "k2", "k3", "k3++", "k4", "k5"] | None, Field(validate_default=True)
    ] = None
    """KL estimator for top_k = 0, for reproduction; default k4 (forward_kl: k5). k1: gradient 0."""
    importance_clip: Annotated[tuple[Weight, Weight] | None, Field(examples=[[0.0, 2.0]])] = None
    """[MIN, MAX] of the importance weights of sampled tokens; [0, MAX] is TIS. None: no bound."""
    importance_mask: Annotated[tuple[Weight, Weight] | None, Field(examples=[[0.5, 5.0]])] = None
    """[MIN, MAX]: sampled tokens with other importance weights are masked (IcePop: [0.5, 5])."""
    max_prompt_tokens: Count = 512
    """Longer prompts are skipped and counted. Unset: fits the context; see docs/jobs.md."""
    max_new_tokens: Count = 1024
    """Maximum number of tokens of an answer. Unset: fits the context."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Temperature of sampling, and of student, anchor and teacher in the loss."""

    @field_validator("estimator")
    @classmethod
    def _check_estimator(cls, estimator: str | None, info: ValidationInfo) -> str | None:
        if estimator is not None and info.data.get("top_k"):
            raise ValueError("needs top_k = 0; with top_k > 0, set tail instead")
        if estimator is not None and "divergence" in info.data:
            expected = "forward_kl" if estimator == "k5" else "reverse_kl"
            if info.data["divergence"] != expected:
                raise ValueError(f"estimates the other KL; set divergence = '{expected}'")
        return estimator

    @field_validator("tail")
    @classmethod
    def _fits_divergence(cls, tail: str | None, info: ValidationInfo) -> str | None:
        return check_tail(tail, info.data.get("divergence"))

    @field_validator("tail")
    @classmethod
    def _has_a_baseline(cls, tail: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("kl_in") == "reward" and tail not in (None, *BASELINES):
            raise ValueError(
                "is not used with kl_in = 'reward', whose baseline is 'bucket+draws' (default) or "
                "'bucket'; remove the key"
            )
        return tail

    @field_validator("estimator")
    @classmethod
    def _is_of_the_loss(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("kl_in") == "reward":
            raise ValueError("is not used with kl_in = 'reward'; remove the key")
        return value

    @field_validator("rollouts_per_prompt")
    @classmethod
    def _is_a_group(cls, count: int, info: ValidationInfo) -> int:
        if count == 1 and info.data.get("reward_weight") and info.data.get("advantages") != "gae":
            raise ValueError("must be 2 or more: an advantage compares the answers of a group")
        return count

    @field_validator("divergence")
    @classmethod
    def _can_be_a_reward(cls, divergence: str, info: ValidationInfo) -> str:
        if divergence == "forward_kl" and info.data.get("kl_in") == "reward":
            raise ValueError(
                "kl_in = 'reward' needs reverse_kl; set divergence = 'reverse_kl' or kl_in = 'loss'"
            )
        return divergence

    @field_validator("importance_clip", "importance_mask")
    @classmethod
    def _is_a_range(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is None:
            return None
        if bounds[0] > bounds[1]:
            raise ValueError("must be [MIN, MAX] with MIN <= MAX")
        if info.field_name == "importance_mask" and info.data.get("importance_clip") is not None:
            raise ValueError("is not used with importance_clip; remove one of the two keys")
        return bounds

    @property
    def total_updates(self) -> int:
        """Number of optimizer updates in a step, over all epochs of the step."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def tail_mode(self) -> Tail:
        """The tail mode for `topk_kl`: the key `tail`, or its default, which is unbiased."""
        # With forward KL the anchor chooses the head, after the student has drawn.
        default: Tail = "bucket+draws" if self.divergence == "reverse_kl" else "bucket+sampled"
        return self.tail or default

    @property
    def direction(self) -> Literal["forward", "reverse"]:
        """Direction of the KL, "forward" or "reverse", as the loss functions expect it."""
        return "reverse" if self.divergence == "reverse_kl" else "forward"


class AnchorConfig(Table):
    """The anchor of the KL: a moving average of the student's weights.

    The method is EMA-PG (arXiv 2602.04417).
    """

    tau: Annotated[float, Field(ge=0, le=1)] = 0.95
    """anchor = tau * anchor + (1 - tau) * student. 1 keeps the initial student as the anchor."""
    update_period: Count = 10
    """Number of optimizer updates per update of the anchor."""
    context: str | None = None
    """Text before the prompt that only the anchor reads; may contain {columns} of the data."""
