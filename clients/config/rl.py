"""What reinforcement learning is: the model of a job file with `method.type = "rl"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from clients.config.common import Count, DataConfig, Table, TeacherLink, TrainingJob
from clients.config.environment import SearchConfig
from clients.config.reward import RewardConfig

Weight = Annotated[float, Field(ge=0)]


class AnchorConfig(Table):
    """A moving average of the student's own weights, which holds it back (EMA-PG)."""

    tau: Annotated[float, Field(ge=0, le=1)] = 0.95
    """anchor = tau * anchor + (1 - tau) * student; 1: the student as it began, for ever."""
    update_period: Count = 10
    """Optimizer updates between two of the anchor."""
    context: str | None = None
    """What only the anchor reads before the prompt: text with {columns} of the data."""


class RLConfig(Table):
    """Reinforcement learning (GRPO), with a KL to the anchor, to a teacher, or to both."""

    type: Literal["rl"]
    """The method."""
    reward_weight: Weight = 1.0
    """Of the policy gradient; 0: rewards are measured only, the KL alone is learned from."""
    advantages: Literal["group", "group_mean", "gae"] = "group"
    """(reward - mean) / std of a prompt's answers; without the std; or PPO's, with a critic."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """gae: how far an advantage looks beyond the critic; 1: to the reward itself."""
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """gae: of the critic, one linear layer on the student's states."""
    rollouts_per_prompt: Count = 8
    """Answers sampled for one prompt: a group."""
    updates_per_step: Count = 1
    """Optimizer updates of one step, each with its share of the step's prompts (PPO)."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Ratios below 1 - clip_low earn nothing more,"""
    clip_high: Weight = 0.28
    """nor do those above 1 + clip_high."""
    ratio: Literal["token", "sequence"] = "token"
    """Of each token, or of whole answers (the geometric mean of their tokens', GSPO)."""
    aggregate: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """All tokens count alike, or all answers."""
    mask_truncated: bool = False
    """Answers cut at `max_new_tokens` are not learned from."""
    beta: Weight = 0.001
    """Of the KL to the anchor; 0: no anchor is kept."""
    teacher_beta: Weight = 1.0
    """Of the KL to the teacher, where there is one."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The KL's own gradient, or minus the sampled KL as an advantage (with vOPD's baseline)."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """KL(student||anchor) or KL(anchor||student); likewise of a teacher."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 32
    """Head ids of a row, as teacher.top_k of `on_policy`; 0: the sampled token is all there is."""
    tail: Literal["none", "published", "sampled", "bucket", "bucket+sampled"] = "bucket+sampled"
    """What stands for the vocabulary outside the head; the default: unbiased, least variance."""
    estimator: Annotated[
        Literal["k1", "k2", "k3", "k3++", "k4", "k5"] | None, Field(validate_default=True)
    ] = None
    """Of the KL where top_k = 0; by default k4, or k5 (forward_kl). k1 has no gradient of a KL."""
    importance_clip: tuple[Weight, Weight] | None = None
    """Least and greatest weight p/mu of a sampled KL, where a step has several updates."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out, and counted."""
    max_new_tokens: Count = 1024
    """Tokens of one answer."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the sampling, and of student, anchor and teacher in the loss."""

    @field_validator("estimator")
    @classmethod
    def _fits(cls, estimator: str | None, info: ValidationInfo) -> str | None:
        if estimator is not None and info.data.get("top_k"):
            raise ValueError("needs top_k = 0: a head has a tail in its place")
        if estimator is not None and "divergence" in info.data:
            meant = "forward_kl" if estimator == "k5" else "reverse_kl"
            if info.data["divergence"] != meant:
                raise ValueError(f"estimates the other KL; it needs divergence = '{meant}'")
        return estimator

    @field_validator("tail", "estimator", "importance_clip")
    @classmethod
    def _is_of_the_loss(cls, value: object, info: ValidationInfo) -> object:
        said = value not in (None, "bucket+sampled")
        if said and info.data.get("kl_in") == "reward":
            raise ValueError("kl_in = 'reward' has no use for it; leave it out")
        return value

    @field_validator("rollouts_per_prompt")
    @classmethod
    def _is_a_group(cls, count: int, info: ValidationInfo) -> int:
        if count == 1 and info.data.get("reward_weight") and info.data.get("advantages") != "gae":
            raise ValueError("one answer has no group to be better than; take 2 or more")
        return count

    @field_validator("divergence")
    @classmethod
    def _can_be_a_reward(cls, divergence: str, info: ValidationInfo) -> str:
        if divergence == "forward_kl" and info.data.get("kl_in") == "reward":
            raise ValueError("kl_in = 'reward' is the reverse KL: take it, or kl_in = 'loss'")
        return divergence

    @field_validator("importance_clip")
    @classmethod
    def _is_a_range_in_use(
        cls, clip: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if clip is not None and clip[0] > clip[1]:
            raise ValueError("must be [LEAST, GREATEST]")
        if clip is not None and info.data.get("updates_per_step") == 1:
            raise ValueError("needs updates_per_step of 2 or more: with one, every weight is 1")
        return clip

    @property
    def direction(self) -> Literal["forward", "reverse"]:
        """Of the KL."""
        return "reverse" if self.divergence == "reverse_kl" else "forward"


class RLJob(TrainingJob):
    """A job that learns from rewards."""

    method: RLConfig
    teacher: TeacherLink | None = None
    """A table `teacher` adds the KL to a service, weighed by `method.teacher_beta`."""
    anchor: AnchorConfig = AnchorConfig()
    reward: Annotated[RewardConfig | None, Field(validate_default=True)] = None
    """Without it only the KL is learned from."""
    environment: SearchConfig | None = None
    """What the student may ask while it answers."""
    data: Annotated[DataConfig | None, Field(validate_default=True)] = None
    """The prompts; a reward of the type reasoning_gym makes its own."""

    @field_validator("method")
    @classmethod
    def _has_enough_prompts(cls, method: RLConfig, info: ValidationInfo) -> RLConfig:
        train = info.data.get("train")
        if train and train.prompts_per_step < method.updates_per_step * train.processes:
            raise ValueError(
                "each of method.updates_per_step needs a prompt for each of train.processes; "
                "raise train.prompts_per_step"
            )
        return method

    @field_validator("reward")
    @classmethod
    def _leaves_a_loss(cls, reward: RewardConfig | None, info: ValidationInfo) -> object:
        if not {"method", "teacher", "anchor"} <= info.data.keys():
            return reward
        method, teacher, anchor = (info.data[name] for name in ("method", "teacher", "anchor"))
        if reward is not None and method.reward_weight > 0:
            return reward
        if method.estimator == "k1":
            raise ValueError(
                "without a reward nothing is learned: the gradient of method.estimator = 'k1' has "
                "a mean of zero; take 'k4', the default"
            )
        taught = teacher is not None and method.teacher_beta > 0
        if not (method.beta or taught):
            raise ValueError("without a reward the job needs method.beta > 0 or a teacher")
        if not taught and anchor.context is None:
            raise ValueError(
                "without a reward nothing is learned: the anchor begins as the student, and reads "
                "what it reads; give a reward, a teacher, or anchor.context"
            )
        return reward

    @field_validator("anchor")
    @classmethod
    def _is_asked(cls, anchor: AnchorConfig, info: ValidationInfo) -> AnchorConfig:
        method = info.data.get("method")
        if method and not method.beta and anchor.context is not None:
            raise ValueError("method.beta = 0 has no anchor to read `context`; raise it")
        return anchor

    @field_validator("anchor")
    @classmethod
    def _is_another_than_the_student(
        cls, anchor: AnchorConfig, info: ValidationInfo
    ) -> AnchorConfig:
        method = info.data.get("method")
        if not (method and method.beta) or anchor.context is not None:
            return anchor
        if anchor.tau == 0 and anchor.update_period == method.updates_per_step == 1:
            raise ValueError(
                "with tau = 0 and update_period = 1 it is the student itself, and its KL nothing; "
                "raise one of them, or set method.beta = 0"
            )
        return anchor

    @field_validator("environment")
    @classmethod
    def _leaves_room(
        cls, environment: SearchConfig | None, info: ValidationInfo
    ) -> SearchConfig | None:
        method = info.data.get("method")
        if environment and method and environment.max_passage_tokens >= method.max_new_tokens:
            raise ValueError(
                f"max_passage_tokens = {environment.max_passage_tokens} leave no word of "
                f"method.max_new_tokens = {method.max_new_tokens}, which counts them: an answer "
                "would end with its first query; lower the one or raise the other"
            )
        return environment

    @field_validator("data")
    @classmethod
    def _is_there_if_needed(cls, data: DataConfig | None, info: ValidationInfo) -> object:
        if "reward" not in info.data:
            return data
        reward = info.data["reward"]
        generated = reward is not None and reward.task is not None
        if data is not None and generated:
            raise ValueError("the reward reasoning_gym:TASK makes its own prompts; leave it out")
        if data is None and not generated:
            raise ValueError("missing; only the reward reasoning_gym:TASK makes its own prompts")
        return data

    @property
    def teacher_addresses(self) -> dict[str, str | list[str]]:
        """As OnPolicyJob's; empty where there is no teacher."""
        return {} if self.teacher is None else {"": self.teacher.address}

    @property
    def sequences_per_step(self) -> int:
        """As OnPolicyJob's."""
        return self.train.prompts_per_step * self.method.rollouts_per_prompt
