"""The inputs and results of `prepare`, and the parts that several methods use.

Each method file (`on_policy.py`, `offline.py`, `rl.py`, `sft.py`) has two functions. `prepare`
reads and checks the data of a job before any weight is loaded, so that wrong data is refused early.
`build` returns the `Method` that the trainer (`loop/trainer.py`) runs. The trainer does not depend
on the type of method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from accelerate import Accelerator

from clients.config.kinds import AnyTraining
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.tables.data import DataConfig
from clients.data.images import ImageReader
from protos.errors import InvalidInput
from student_trainer.cross_tokenizer.comparison import (
    SpecialTokenPair,
    TokenizerPair,
    compare_tokenizers,
)
from student_trainer.data.captured_stores import TrainingStore
from student_trainer.data.prompts import ModelIds, Prompt
from student_trainer.loop.evaluation import Evaluation, HeldOutObjective, TaskEvaluation
from student_trainer.loop.learner import Method
from student_trainer.model.loading import computes_in_bfloat16, load_image_reader, vocabulary
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rewards import Rewards
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.rollout_client.order import SamplingSettings
from student_trainer.rollouts.rollouts import HuggingFaceRollouts, Rollouts
from student_trainer.rollouts.sampler import Sampler
from student_trainer.run.model_checks import check_vocabulary, check_width
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.source import PendingRows

# Builds the method of a job when the student is loaded, and the number of the job's steps is known;
# without an engine, this process samples. Collective.
Build: TypeAlias = Callable[
    [Any, Accelerator, Replicated | Sharded, EngineConnection | None], Method
]


@dataclass(frozen=True)
class Inputs:
    """The inputs of `prepare` for every method.

    - tokenizer: the tokenizer of the student.
    - width: number of logits of the student.
    - max_length: maximum number of tokens that the student can read; None without a limit.
    - teachers: the connection to each teacher, by name; the name is "" if the job has one teacher.
    - rewards: the reward functions; None if the job has none.
    """

    tokenizer: Any
    width: int
    max_length: int | None
    teachers: Mapping[str, Connection]
    rewards: Rewards | None

    @property
    def model_ids(self) -> ModelIds:
        """The token ids that have a logit."""
        return ModelIds.of_tokenizer(self.tokenizer, self.width)

    def count_common_ids(self) -> int:
        """Return the number of ids that the student and all its teachers have in common.

        Raises WrongState if a teacher has another tokenizer, or if a token of the tokenizer has no
        logit.
        """
        tokens = vocabulary(self.tokenizer)
        teachers = self.teachers.values()
        counts = (check_vocabulary(teacher, tokens, self.width) for teacher in teachers)
        return min(counts, default=self.width)


@dataclass(frozen=True)
class Preparation:
    """The result of `prepare`.

    - vocab_size: number of ids that teachers and student have in common.
    - epoch_size: number of prompts or stored sequences in one pass over the data; 0 if the job
      generates its prompts.
    - build: builds the method after the student is loaded.
    - images: reads the images in the job's prompts; None without images.
    - store: the store of rows that the job trains on; None without a store.
    """

    vocab_size: int
    epoch_size: int
    build: Build
    images: ImageReader | None = None
    store: TrainingStore | None = None


def pair_tokenizers(
    config: OnPolicyJob | RLJob, inputs: Inputs
) -> tuple[TokenizerPair | SpecialTokenPair | None, int]:
    """Return the tokenizers of student and teacher, and the number of ids that they share.

    The first result is None if the tokenizers are equal. Raises the errors of `compare_tokenizers`
    and `Inputs.count_common_ids`.
    """
    pair = compare_tokenizers(config, inputs.teachers, inputs.tokenizer)
    if pair is None:
        return None, inputs.count_common_ids()
    if isinstance(pair, SpecialTokenPair):
        return pair, check_width(inputs.teachers[""], pair.tokens, inputs.width)
    return pair, min(inputs.width, pair.tokens)  # later ids are padding


def load_prompt_images(config: OnPolicyJob | RLJob) -> ImageReader | None:
    """Return the reader of the images in the job's prompts; None if the prompts have no images."""
    return load_image_reader(config.student) if config.prompt_format.image_column else None


def check_shares(data: DataConfig | None, processes: int, held_out: int) -> None:
    """Raise InvalidInput if there are fewer held-out prompts than processes.

    Each process needs at least one of the `held_out` prompts.
    """
    if held_out < processes:
        raise InvalidInput(
            f"{held_out} held-out prompts are too few for {processes} processes",
            field="data.eval_path" if data and data.eval_path else "data.path",
            hint="provide more prompts, or lower train.processes",
        )


def sampling_settings(
    config: AnyTraining,
    student: Replicated | Sharded,
    *,
    top_k: int,
    temperature: float,
    draws: int = 0,
) -> SamplingSettings:
    """Return the settings of rollouts, for this process or for an engine.

    - top_k: the number of head ids to record for each sampled token; 0 records none.
    - draws: the number of ids to draw from the tail for each token.
    """
    return SamplingSettings(
        top_k=top_k,
        temperature=temperature,
        draws=draws,
        seed=config.seed,
        stream_tokens=config.method.max_new_tokens,
        batch_tokens=sampling_batch(config),
        vocab_size=student.full.vocab_size,
    )


def sampling_batch(config: AnyTraining) -> int:
    """Return the maximum number of tokens of a sampling batch, including padding.

    Sampling stores no activations, so its batches can be larger than training batches.
    """
    return 4 * config.train.tokens_per_micro_batch


def make_sampler(
    config: AnyTraining, student: Replicated | Sharded, tokenizer: Any, settings: SamplingSettings
) -> Sampler:
    """Return a sampler that runs the student in this process."""
    return Sampler(
        student.full.model,
        tokenizer,
        top_k=settings.top_k,
        temperature=settings.temperature,
        draws=settings.draws,
        vocab_size=settings.vocab_size,
        bf16=computes_in_bfloat16(config.student),
        never=student.full.placeholder,
        equal_lengths=student.full.equal_lengths,
    )


def plain_rollouts(
    config: AnyTraining, student: Replicated | Sharded, tokenizer: Any, settings: SamplingSettings
) -> HuggingFaceRollouts:
    """Return single-turn rollouts that are sampled in this process."""
    return HuggingFaceRollouts(
        make_sampler(config, student, tokenizer, settings),
        max_new_tokens=settings.stream_tokens,
        batch_tokens=settings.batch_tokens,
    )


def held_out_evaluation(
    config: AnyTraining,
    accelerator: Accelerator,
    objective: HeldOutObjective,
    read_held_out: Callable[[], list[PendingRows]],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    rollouts: Rollouts,
) -> Evaluation:
    """Return the held-out evaluation of a job without rewards.

    - read_held_out: returns this process's held-out sequences with their rows.
    - prompts: the prompts of all processes, for `eval.metric`.
    """
    task = (
        TaskEvaluation(prompts, accelerator, tokenizer, rollouts) if config.is_evaluated else None
    )
    return Evaluation(
        accelerator,
        objective,
        read_held_out,
        task,
        tokenizer=tokenizer,
        samples=rollouts.in_process and (config.samples or config.is_evaluated),
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
    )
