"""The model of reinforcement learning: a job file with `method.type = "rl"`.

Each option's source is in docs/methods.md.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from clients.config.tables.anchor import AnchorConfig
from clients.config.tables.common import (
    FORMER_TAIL,
    Count,
    SampledEvalConfig,
    Table,
    Tail,
    TailDraws,
    TeacherLink,
    TrainingJob,
    check_tail,
)
from clients.config.tables.data import DataConfig, prompt_rules
from clients.config.tables.environment import SearchConfig
from clients.config.tables.reward import HARMLESS, RewardConfig
from clients.config.unused import Rule, refuse_unused

Weight = Annotated[float, Field(ge=0)]
# Tail modes without an importance weight of the sampled token. Draws have their own log-probs.
UNWEIGHTED = ("none", "bucket", "bucket+draws")
# Tail modes of the baseline of kl_in = "reward".
BASELINES = ("bucket+draws", "bucket", FORMER_TAIL)


class RLConfig(Table):
    """Reinforcement learning (GRPO), with a KL to the anchor, to a teacher, or to both."""

    type: Literal["rl"]
    """The method."""
    reward_weight: Weight = 1.0
    """Weight of the policy gradient. 0: rewards are only measured, the KL alone trains."""
    advantages: Literal["group", "group_mean", "gae"] = "group"
    """group: (reward - mean) / std of a prompt's answers. group_mean: no std. gae: a critic."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """gae: lambda of the estimate. 1 uses the full reward, lower values trust the critic more."""
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """gae: learning rate of the critic, a linear layer on the student's hidden states."""
    rollouts_per_prompt: Count = 8
    """Answers sampled per prompt (the group)."""
    updates_per_step: Count = 1
    """Optimizer updates per step; each uses its share of the step's prompts (PPO)."""
    epochs_per_step: Count = 1
    """Times that the updates of a step are repeated, with the same rollouts (PPO)."""
    dynamic_sampling: Count = 1
    """Most rounds of sampling per step, to replace prompts with equal rewards (DAPO). 1: off."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip of the policy ratio, at 1 - clip_low (PPO)."""
    clip_high: Weight = 0.28
    """Upper clip of the policy ratio, at 1 + clip_high (DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper clip of the policy ratio where the advantage is negative; 3 is usual."""
    ratio: Literal["token", "sequence"] = "token"
    """token: a policy ratio per token. sequence: per answer, their geometric mean (GSPO)."""
    aggregate: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """token-mean: tokens have equal weight. seq-mean-token-mean: answers have equal weight."""
    mask_truncated: bool = False
    """Do not train on answers that were cut off at `max_new_tokens`."""
    beta: Weight = 0.001
    """Weight of the KL to the anchor; 0 keeps no anchor."""
    teacher_beta: Weight = 1.0
    """Weight of the KL to the teacher, if the job has a teacher."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a loss term. reward: adds minus the sampled KL, with a baseline, to advantages."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """reverse_kl: KL(student||anchor). forward_kl: KL(anchor||student). Same for a teacher."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 32
    """Head ids per row, as `teacher.top_k` of `on_policy`. 0: rows of the sampled token only."""
    tail: Tail | None = None
    """Estimate of the KL over the tail. Default: bucket+draws; forward_kl: bucket+sampled."""
    tail_draws: TailDraws = 48
    """Ids per row that the student draws from its tail: for bucket+draws, or kl_in = "reward"."""
    estimator: Annotated[
        Literal["k1", "k2", "k3", "k3++", "k4", "k5"] | None, Field(validate_default=True)
    ] = None
    """KL estimator for top_k = 0; default k4 (forward_kl: k5). The mean gradient of k1 is zero."""
    importance_clip: Annotated[tuple[Weight, Weight] | None, Field(examples=[[0.0, 2.0]])] = None
    """[MIN, MAX] of importance weights of sampled tokens; [0, MAX] is TIS. None: unbiased."""
    importance_mask: Annotated[tuple[Weight, Weight] | None, Field(examples=[[0.5, 5.0]])] = None
    """[MIN, MAX]: sampled tokens with another importance weight count 0 (IcePop: [0.5, 5])."""
    max_prompt_tokens: Count = 512
    """Longer prompts are skipped and counted."""
    max_new_tokens: Count = 1024
    """Maximum number of tokens of an answer."""
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Temperature of sampling, and of student, anchor and teacher in the loss."""

    @field_validator("estimator")
    @classmethod
    def _fits(cls, estimator: str | None, info: ValidationInfo) -> str | None:
        if estimator is not None and info.data.get("top_k"):
            raise ValueError("needs top_k = 0; with top_k > 0, set tail instead")
        if estimator is not None and "divergence" in info.data:
            meant = "forward_kl" if estimator == "k5" else "reverse_kl"
            if info.data["divergence"] != meant:
                raise ValueError(f"estimates the other KL; set divergence = '{meant}'")
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
                "'bucket'; leave it out"
            )
        return tail

    @field_validator("estimator")
    @classmethod
    def _is_of_the_loss(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("kl_in") == "reward":
            raise ValueError("is not used with kl_in = 'reward'; leave it out")
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
            raise ValueError("kl_in = 'reward' needs reverse_kl; choose it, or kl_in = 'loss'")
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
            raise ValueError("is not used with importance_clip; leave one of them out")
        return bounds

    @property
    def total_updates(self) -> int:
        """Optimizer updates of a step, over all epochs."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def tail_mode(self) -> Tail:
        """The tail mode of `topk_kl`. Both defaults are unbiased."""
        return self.tail or _default_tail(self.divergence)

    @property
    def direction(self) -> Literal["forward", "reverse"]:
        """Direction of the KL, as the loss functions name it."""
        return "reverse" if self.divergence == "reverse_kl" else "forward"


def _default_tail(divergence: str | None) -> Tail:
    # With forward KL the anchor chooses the head, after the student has drawn.
    return "bucket+draws" if divergence == "reverse_kl" else "bucket+sampled"


class RLJob(TrainingJob):
    """A reinforcement learning job."""

    method: RLConfig
    eval: SampledEvalConfig = SampledEvalConfig()
    teacher: TeacherLink | None = None
    """The table `teacher` adds a KL to a teacher service, weighted by `method.teacher_beta`."""
    anchor: AnchorConfig = AnchorConfig()
    reward: Annotated[RewardConfig | None, Field(validate_default=True)] = None
    """The reward function. Without it, the student learns from the KL alone."""
    environment: SearchConfig | None = None
    """The search engine that the student may call while it answers."""
    data: Annotated[DataConfig | None, Field(validate_default=True)] = None
    """The prompts. Leave the table out if a reasoning_gym task generates them."""

    @field_validator("method")
    @classmethod
    def _has_enough_prompts(cls, method: RLConfig, info: ValidationInfo) -> RLConfig:
        train = info.data.get("train")
        if train and train.prompts_per_step < method.updates_per_step * train.processes:
            raise ValueError(
                "every one of method.updates_per_step updates needs a prompt for each of "
                "train.processes processes; raise train.prompts_per_step"
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
                "a mean of zero; use 'k4', the default"
            )
        taught = teacher is not None and method.teacher_beta > 0
        if not (method.beta or taught):
            raise ValueError("without a reward the job needs method.beta > 0 or a teacher")
        if not taught and anchor.context is None:
            raise ValueError(
                "without a reward nothing is learned: the anchor starts equal to the student and "
                "reads the same prompt; give a reward, a teacher, or anchor.context"
            )
        return reward

    @field_validator("anchor")
    @classmethod
    def _is_asked(cls, anchor: AnchorConfig, info: ValidationInfo) -> AnchorConfig:
        method = info.data.get("method")
        if method and not method.beta and anchor.context is not None:
            raise ValueError("method.beta = 0 keeps no anchor to read `context`; raise it")
        return anchor

    @field_validator("anchor")
    @classmethod
    def _is_another_than_the_student(
        cls, anchor: AnchorConfig, info: ValidationInfo
    ) -> AnchorConfig:
        method = info.data.get("method")
        if not (method and method.beta) or anchor.context is not None:
            return anchor
        if anchor.tau == 0 and anchor.update_period == method.total_updates == 1:
            raise ValueError(
                "with tau = 0 and update_period = 1 the anchor equals the student, so the KL is "
                "zero; raise one of them, or set method.beta = 0"
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
                f"max_passage_tokens = {environment.max_passage_tokens} leaves no room in "
                f"method.max_new_tokens = {method.max_new_tokens}, which includes passages: an "
                "answer would end at its first query; lower the first or raise the second"
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
            raise ValueError("the reward reasoning_gym:TASK generates its prompts; leave it out")
        if data is None and not generated:
            raise ValueError("missing; only the reward reasoning_gym:TASK generates its prompts")
        return data

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        rules = [*self._rules_of_rewards(), *self._rules_of_kls(), *prompt_rules(self.data)]
        return refuse_unused(self, rules)

    def _rules_of_rewards(self) -> list[Rule]:
        method, reward = self.method, self.reward
        rewarded = reward is not None and method.reward_weight > 0
        no_reward = "the student learns from no reward; leave it out, or add the table `reward`"
        return [
            (reward is not None or not method.reward_weight, "method.reward_weight", no_reward),
            (rewarded, "method.advantages", no_reward),
            (
                rewarded and method.advantages != "gae",
                "method.dynamic_sampling",
                "no advantage comes from a group; leave it out, or learn from a reward without gae",
            ),
            (
                reward is not None or self.eval.metric != "none",
                "eval.samples eval.temperature",
                "held-out answers are not scored; leave it out, or set eval.metric or a reward",
            ),
            (
                method.advantages == "gae",
                "method.gae_lambda method.critic_learning_rate",
                "there is no critic; leave it out, or set method.advantages = 'gae'",
            ),
            (
                rewarded or method.kl_in == "reward",
                "method.clip_low method.clip_high method.dual_clip method.ratio",
                "there is no policy gradient; leave it out, or add the table `reward`",
            ),
            (
                reward is None or reward.type not in HARMLESS,
                "reward.timeout_seconds",
                "comparing texts takes no time; leave it out",
            ),
            (
                reward is not None or self.eval.metric != "none",
                "data.answer_column",
                "answers are only read by rewards and by eval.metric; leave it out",
            ),
            (False, "data.teacher_column", "a job of method rl has one teacher; leave it out"),
            (False, "data.weight_column", "rewards decide in a job of method rl; leave it out"),
            # p_old comes from a pass without gradients, which compiled layers would round apart.
            (False, "student.compile", "ratios of rl need updates that round alike; leave it out"),
            (
                self.environment is None or self.environment.remote,
                "environment.timeout_seconds",
                "the retriever is a file, which needs no time limit; leave it out",
            ),
        ]

    def _rules_of_kls(self) -> list[Rule]:
        method, teacher = self.method, self.teacher
        pulled = method.beta > 0 or (teacher is not None and method.teacher_beta > 0)
        no_kl = "the loss has no KL; leave it out, or raise method.beta, or add a teacher"
        return [
            (
                teacher is not None,
                "method.teacher_beta",
                "the job has no teacher; leave it out, or add the table `teacher`",
            ),
            (pulled, "method.kl_in method.estimator", no_kl),
            (
                self._weighs_sampled_tokens(pulled),
                "method.importance_clip method.importance_mask",
                "no term of the loss has an importance weight: there is no policy gradient, and "
                f"tail = '{method.tail_mode}' reads no sampled token; leave it out",
            ),
            (pulled or method.tail == FORMER_TAIL, "method.tail", no_kl),
            (pulled or teacher is not None, "method.divergence", no_kl),
            (
                method.top_k > 0 or method.tail == FORMER_TAIL,
                "method.tail",
                "with method.top_k = 0 there is no head and no tail; set method.estimator instead",
            ),
            (
                self.draws > 0,
                "method.tail_draws",
                "the loss reads no draws: that needs a KL, method.top_k > 0 and method.tail = "
                "'bucket+draws'; leave it out",
            ),
            (
                method.beta > 0,
                "anchor.tau anchor.update_period",
                "with method.beta = 0 there is no anchor; leave it out, or raise method.beta",
            ),
            (
                self.anchor.tau < 1,
                "anchor.update_period",
                "with anchor.tau = 1 the anchor never moves; leave it out, or lower anchor.tau",
            ),
        ]

    def _weighs_sampled_tokens(self, pulled: bool) -> bool:
        """Return whether a term of the loss is multiplied by importance weights."""
        method = self.method
        rewarded = self.reward is not None and method.reward_weight > 0
        sampled_kl = method.top_k == 0 or method.tail_mode not in UNWEIGHTED
        return rewarded or method.kl_in == "reward" or (pulled and sampled_kl)

    @property
    def draws(self) -> int:
        """Ids per row that the student draws from its own tail; 0: the loss reads none."""
        method = self.method
        # With teacher_beta = 0 the KL to the teacher is only measured.
        pulled = method.beta > 0 or self.teacher is not None
        wanted = method.tail_mode == "bucket+draws" and method.top_k > 0 and pulled
        return method.tail_draws if wanted else 0

    @property
    def teacher_addresses(self) -> dict[str, str | list[str]]:
        """As OnPolicyJob.teacher_addresses; empty if the job has no teacher."""
        return {} if self.teacher is None else {"": self.teacher.address}

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences in a step, over all processes."""
        return self.train.prompts_per_step * self.method.rollouts_per_prompt
