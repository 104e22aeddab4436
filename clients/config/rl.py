"""The keys of reinforcement learning: a job file with `method.type = "rl"`.

docs/methods.md names the source of each option, such as a paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from clients.config.tables.common import FORMER_TAIL, Rule, SampledEvalConfig, refuse_unused
from clients.config.tables.data import DataConfig, DataFile, columns_of, prompt_rules
from clients.config.tables.environment import PASSAGES, SearchConfig
from clients.config.tables.job import Extra, TrainingJob
from clients.config.tables.reward import HARMLESS, RewardConfig, check_prompt_source
from clients.config.tables.rl_method import UNWEIGHTED, AnchorConfig, RLConfig
from clients.config.tables.rollouts import RolloutsConfig, in_trainer_rules, rollout_rules
from clients.config.tables.teacher import (
    OtherTokens,
    RowRequest,
    TeacherLink,
    other_tokens_rules,
    started_rules,
)
from clients.data.prompt_format import PromptFormat


class RLTeacher(OtherTokens, TeacherLink):
    """A teacher service. Its tokenizer may have other special tokens than the student's."""


class RLJob(TrainingJob):
    """A reinforcement learning job."""

    samples = True
    learns_from_zero = True
    aligns_tokens: ClassVar[bool] = False  # the KL compares rows of the same tokens
    alignment_keys: ClassVar[Sequence[str]] = ()
    method: RLConfig
    eval: SampledEvalConfig = SampledEvalConfig()
    teacher: RLTeacher | None = None
    """The table `teacher` adds a KL to a teacher service, weighted by `method.teacher_beta`."""
    anchor: AnchorConfig = AnchorConfig()
    reward: Annotated[RewardConfig | None, Field(validate_default=True)] = None
    """The reward function. Without this table, the student only minimises the KL."""
    rollouts: RolloutsConfig = RolloutsConfig()
    environment: SearchConfig | None = None
    """The search engine that the student may call while it answers."""
    data: Annotated[DataConfig | None, Field(validate_default=True)] = None
    """The prompts. Omit the table if a reasoning_gym task generates the prompts."""

    @field_validator("method")
    @classmethod
    def _has_enough_prompts(cls, method: RLConfig, info: ValidationInfo) -> RLConfig:
        train = info.data.get("train")
        if train and train.prompts_per_step < method.updates_per_step * train.processes:
            raise ValueError(
                "each of the method.updates_per_step updates needs at least one prompt per"
                " process; raise train.prompts_per_step"
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
        has_teacher_kl = teacher is not None and method.teacher_beta > 0
        if not (method.beta or has_teacher_kl):
            raise ValueError("without a reward the job needs method.beta > 0 or a teacher")
        if not has_teacher_kl and anchor.context is None:
            raise ValueError(
                "without a reward nothing is learned: the anchor starts equal to the student and "
                "reads the same prompt; give a reward, a teacher, or anchor.context"
            )
        return reward

    @field_validator("anchor")
    @classmethod
    def _check_context(cls, anchor: AnchorConfig, info: ValidationInfo) -> AnchorConfig:
        method = info.data.get("method")
        if method and not method.beta and anchor.context is not None:
            raise ValueError(
                "`context` needs an anchor, and method.beta = 0 has none; raise method.beta"
            )
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
                "zero; raise one of the two, or set method.beta = 0"
            )
        return anchor

    @field_validator("rollouts")
    @classmethod
    def _can_be_ahead(cls, rollouts: RolloutsConfig, info: ValidationInfo) -> RolloutsConfig:
        method = info.data.get("method")
        if method and method.dynamic_sampling > 1 and rollouts.lag:
            raise ValueError(
                "method.dynamic_sampling may sample again after the weights have changed; set"
                " lag = 0, or remove dynamic_sampling"
            )
        return rollouts

    @field_validator("environment")
    @classmethod
    def _leaves_room(
        cls, environment: SearchConfig | None, info: ValidationInfo
    ) -> SearchConfig | None:
        method = info.data.get("method")
        if environment and method and environment.max_passage_tokens >= method.max_new_tokens:
            raise ValueError(
                f"max_passage_tokens = {environment.max_passage_tokens} leaves no tokens for the"
                f" answer in "
                f"method.max_new_tokens = {method.max_new_tokens}, which includes passages;"
                f" lower the first value or raise the second"
            )
        return environment

    @field_validator("data")
    @classmethod
    def _check_presence(cls, data: DataConfig | None, info: ValidationInfo) -> object:
        if "reward" in info.data:
            check_prompt_source(data, info.data["reward"])
        return data

    @model_validator(mode="after")
    def _fits_images(self) -> Self:
        method_rules = (
            (self.environment is None, "environment"),
            (self.anchor.context is None, "anchor.context"),
            (self.teacher is None or self.teacher.tokenizer == "same", "teacher.tokenizer"),
            (
                self.teacher is None or self.teacher.template_arguments is None,
                "teacher.template_arguments",
            ),
        )
        self._check_beside_images(self.data, [*method_rules, *in_trainer_rules(self.rollouts)])
        return self

    @model_validator(mode="after")
    def _uses_every_key(self) -> Self:
        rules = [*self._rules_of_rewards(), *self._rules_of_kls(), *prompt_rules(self.data)]
        rules += started_rules(self.teacher)
        if self.teacher is not None:
            uses_template = self.data is None or self.data.chat_template
            rules += other_tokens_rules(self.teacher, chat_template=uses_template)
        return refuse_unused(self, [*rules, *rollout_rules(self.rollouts)])

    def _rules_of_rewards(self) -> list[Rule]:
        method, reward = self.method, self.reward
        no_reward = "the job has no reward; remove the key, or add the table `reward`"
        return [
            (
                self.data is not None and method.dynamic_sampling == 1,
                "epochs",
                "a step takes a varying number of prompts, or generates them; set max_steps",
            ),
            (reward is not None or not method.reward_weight, "method.reward_weight", no_reward),
            (self._learns_from_reward, "method.advantages", no_reward),
            (
                self.learns_from_groups,
                "method.dynamic_sampling",
                "gae uses no groups; remove the key, or use a reward without gae",
            ),
            (
                reward is not None or self.is_evaluated,
                "eval.samples eval.temperature",
                "the job scores no held-out answers; remove the key, or set eval.metric or a"
                " reward",
            ),
            (
                method.advantages == "gae",
                "method.gae_lambda method.critic_learning_rate",
                "there is no critic; remove the key, or set method.advantages = 'gae'",
            ),
            (
                self._learns_from_reward or method.kl_in == "reward",
                "method.clip_low method.clip_high method.dual_clip method.ratio",
                "there is no policy gradient; remove the key, or add the table `reward`",
            ),
            (
                reward is None or reward.type not in HARMLESS,
                "reward.timeout_seconds",
                "comparing texts needs no time limit; remove the key",
            ),
            (
                reward is not None or self.is_evaluated,
                "data.answer_column",
                "only rewards and eval.metric use reference answers; remove the key",
            ),
            (False, "data.teacher_column", "a job of method rl has one teacher; remove the key"),
            (False, "data.weight_column", "method rl weights answers by rewards; remove the key"),
            # p_old comes from a pass without gradients, which compiled layers would round apart.
            (
                False,
                "student.compile",
                "the importance ratios of rl need updates with equal rounding; remove the key",
            ),
            (
                self.environment is None or self.environment.remote,
                "environment.timeout_seconds",
                "the retriever is a file, which needs no time limit; remove the key",
            ),
        ]

    def _rules_of_kls(self) -> list[Rule]:
        method, teacher = self.method, self.teacher
        has_kl = method.beta > 0 or (teacher is not None and method.teacher_beta > 0)
        no_kl = "the loss has no KL; remove the key, or raise method.beta, or add a teacher"
        return [
            (
                teacher is not None,
                "method.teacher_beta",
                "the job has no teacher; remove the key, or add the table `teacher`",
            ),
            (has_kl, "method.kl_in method.estimator", no_kl),
            (
                self._weighs_sampled_tokens(has_kl),
                "method.importance_clip method.importance_mask",
                "no term of the loss has an importance weight: there is no policy gradient, and "
                f"tail = '{method.tail_mode}' uses no sampled token; remove the key",
            ),
            (has_kl or method.tail == FORMER_TAIL, "method.tail", no_kl),
            (has_kl or teacher is not None, "method.divergence", no_kl),
            (
                method.top_k > 0 or method.tail == FORMER_TAIL,
                "method.tail",
                "with method.top_k = 0 there is no head and no tail; set method.estimator instead",
            ),
            (
                self.draws > 0,
                "method.tail_draws",
                "the loss uses no draws, which need a KL, method.top_k > 0 and method.tail ="
                " 'bucket+draws'; remove the key",
            ),
            (
                method.beta > 0,
                "anchor.tau anchor.update_period",
                "with method.beta = 0 there is no anchor; remove the key, or raise method.beta",
            ),
            (
                self.anchor.tau < 1,
                "anchor.update_period",
                "with anchor.tau = 1 the anchor never changes; remove the key, or lower anchor.tau",
            ),
        ]

    @property
    def _learns_from_reward(self) -> bool:
        return self.reward is not None and self.method.reward_weight > 0

    def _weighs_sampled_tokens(self, has_kl: bool) -> bool:
        """Return whether the loss has a term that is multiplied by importance weights."""
        method = self.method
        is_kl_sampled = method.top_k == 0 or method.tail_mode not in UNWEIGHTED
        return self._learns_from_reward or method.kl_in == "reward" or (has_kl and is_kl_sampled)

    @property
    def prompt_format(self) -> PromptFormat:
        """The format of the prompts of the data set or of the reasoning_gym task."""
        if self.data is not None:
            return self.data.prompt_format
        assert self.reward is not None, "the data or the task provides prompts"
        return PromptFormat(template=self.reward.template)

    @property
    def draws(self) -> int:
        """Ids per row that the student draws from its own tail; 0 if the loss uses none."""
        method = self.method
        # With teacher_beta = 0 the KL to the teacher is only measured.
        computes_kl = method.beta > 0 or self.teacher is not None
        draws_from_tail = method.tail_mode == "bucket+draws" and method.top_k > 0 and computes_kl
        return method.tail_draws if draws_from_tail else 0

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras (optional dependencies) for training, and for a search environment."""
        search = ("rl", "the search environment", "environment.type")
        return [*super().extras, *([] if self.environment is None else [search])]

    @property
    def row_request(self) -> RowRequest:
        """The rows that the job requests from its teacher."""
        method = self.method
        return RowRequest(
            top_k=method.top_k,
            top_k_key="method.top_k",
            temperature=method.temperature,
            sequence_tokens=self.longest_sequence,
            answer_tokens=method.max_new_tokens,
            of_student=method.divergence == "reverse_kl",
            draws=self.draws,
            # As the baseline of a KL reward, only `bucket` needs no draws.
            tail="bucket" if method.kl_in == "reward" else "bucket+sampled",
            teacher_head="use 'forward_kl'",
        )

    @property
    def reads_all_columns(self) -> bool:
        """Always true: rewards may read any column."""
        return True

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.method.max_prompt_tokens + self.method.max_new_tokens

    @property
    def sequences_per_update(self) -> int:
        """Maximum number of answers of one process in an update.

        All answers to a prompt (its group) belong to the same process and update.
        """
        prompts = self.train.prompts_per_step / self.method.updates_per_step / self.processes
        return self.rollouts_per_prompt * math.ceil(prompts)

    @property
    def max_processes(self) -> int:
        """Largest number of processes for which each process gets a prompt in every update."""
        prompts = self.train.prompts_per_step // self.method.updates_per_step
        return min(super().max_processes, prompts)

    @property
    def answers_per_step(self) -> int:
        """Maximum number of answers that one process samples in a step.

        All answers to a prompt (its group) belong to the same process.
        """
        prompts = math.ceil(self.train.prompts_per_step / self.processes)
        return self.rollouts_per_prompt * prompts

    @property
    def answers_per_evaluation(self) -> int:
        """Number of held-out answers, over all processes."""
        return self.eval.prompts * self.eval.samples

    @property
    def anchor_context(self) -> str | None:
        """Text before the prompt that only the anchor reads, or None."""
        return self.anchor.context

    @property
    def has_anchor(self) -> bool:
        """Whether the loss has a KL to an anchor, a moving average (EMA) of the student."""
        return self.method.beta > 0

    @property
    def has_critic(self) -> bool:
        """Whether a critic computes the advantages."""
        return self.method.advantages == "gae"

    @property
    def learns_from_head(self) -> bool:
        """Whether the loss has a KL over head ids, the top-k ids of each row."""
        method = self.method
        has_kl = method.beta > 0 or (self.teacher is not None and method.teacher_beta > 0)
        return has_kl and bool(method.top_k) and method.kl_in == "loss"

    @property
    def learns_from_groups(self) -> bool:
        """Whether an advantage compares the reward of an answer with the other answers of its
        group.

        False if the rewards do not train the student, or if a critic computes the advantages.
        """
        return self._learns_from_reward and not self.has_critic

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data files with the prompts, and the file of passages if the retriever is a file."""
        files = []
        if self.data is not None:
            needs_answers = self.reward is not None and self.reward.needs_reference
            files = self.data.files(
                training_answers=needs_answers,
                held_out_answers=needs_answers or self.is_evaluated,
                columns=columns_of("anchor.context", self.anchor.context),
            )
        if self.environment is not None and not self.environment.remote:
            key = "environment.retriever"
            files.append(DataFile(key, self.environment.retriever, ((key, PASSAGES),)))
        return files
