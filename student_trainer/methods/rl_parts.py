"""Builds the parts of an RL job: samplers, teacher sources, the old policy.

`rl.py` connects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from torch import Tensor

from clients.config.rl import RLJob
from student_trainer.cross_tokenizer.comparison import SpecialTokenPair, build_teacher_input
from student_trainer.data.batch import Batch
from student_trainer.data.sequence import Rollout
from student_trainer.environments.retriever import Retriever
from student_trainer.methods.preparation import (
    Inputs,
    make_sampler,
    plain_rollouts,
    sampling_batch,
    sampling_settings,
)
from student_trainer.methods.rl_prompts import RLPrompts, context_prompt
from student_trainer.parallel.passes import run_passes_over_rollouts
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.rollout_client.engine_rollouts import EngineRollouts
from student_trainer.rollout_client.order import SamplingSettings
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.rollouts.search import SearchConversations, SearchRollouts
from student_trainer.teachers.anchor import Anchor, AnchorTeacher
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.source import TeacherSource


@dataclass(frozen=True)
class RLMaterial(Inputs):
    """The inputs of an RL job that are loaded before the student's weights.

    - prompts: the training prompts and the held-out prompts.
    - retriever: None if the job has no environment.
    - pair: the special tokens of student and teacher; None if they are equal.
    """

    prompts: RLPrompts
    retriever: Retriever | None
    pair: SpecialTokenPair | None


def engine_rollouts(
    config: RLJob,
    material: RLMaterial,
    student: Replicated | Sharded,
    engine: EngineConnection,
    *,
    for_evaluation: bool = False,
) -> EngineRollouts:
    """Return rollouts that the engine samples; see `make_rollouts`."""
    settings = _sampling_settings(config, student, for_evaluation)
    return engine.rollouts(settings, _make_conversations(config, material))


def make_rollouts(
    config: RLJob,
    material: RLMaterial,
    student: Replicated | Sharded,
    engine: EngineConnection | None,
    *,
    for_evaluation: bool = False,
) -> Rollouts:
    """Return the sampler of rollouts for training and for the held-out KL.

    With `for_evaluation`, return the sampler of answers for `eval.metric` and held-out rewards.
    """
    if engine is not None:
        return engine_rollouts(config, material, student, engine, for_evaluation=for_evaluation)
    settings = _sampling_settings(config, student, for_evaluation)
    conversations, tokenizer = _make_conversations(config, material), material.tokenizer
    if conversations is None:
        return plain_rollouts(config, student, tokenizer, settings)
    sampler = make_sampler(config, student, tokenizer, settings)
    return SearchRollouts(conversations, sampler, tokenizer, stream_tokens=settings.stream_tokens)


def _sampling_settings(
    config: RLJob, student: Replicated | Sharded, for_evaluation: bool
) -> SamplingSettings:
    method = config.method
    if for_evaluation and config.eval.temperature:
        return sampling_settings(config, student, top_k=1, temperature=config.eval.temperature)
    # With top_k = 0 only the sampled token counts, but a row needs a head: one id.
    return sampling_settings(
        config,
        student,
        top_k=max(method.top_k, 1),
        temperature=method.temperature,
        draws=config.draws,
    )


def _make_conversations(config: RLJob, material: RLMaterial) -> SearchConversations | None:
    """Return the conversations of the job's environment; None if it has none."""
    if config.environment is None:
        return None
    assert material.retriever is not None, "an environment has a retriever"
    return SearchConversations(
        material.tokenizer,
        material.retriever,
        config.environment,
        max_new_tokens=config.method.max_new_tokens,
        # vLLM forms its own batches; transformers uses the trainer's batches, for bit-identical
        # results.
        batch_tokens=None if config.rollouts.engine == "vllm" else sampling_batch(config),
    )


def teacher_sources(
    config: RLJob, material: RLMaterial, student: Replicated | Sharded
) -> tuple[TeacherSource, ...]:
    """Return a tuple with the job's teacher service; an empty tuple if the job has no teacher."""
    if config.teacher is None:
        return ()
    method, connection = config.method, material.teachers[""]
    remote = RemoteTeacher(
        connection.client,
        top_k=None if method.direction == "reverse" else max(method.top_k, 1),
        temperature=method.temperature,
        f32=config.teacher.logprob_format == "f32",
        vocab_size=connection.narrowed_vocab_size(student.full.vocab_size),
        teacher_input=build_teacher_input(
            config, connection, student.full.vocab_size, material.tokenizer, material.pair
        ),
    )
    return (remote,)


def anchor_teacher(
    config: RLJob,
    material: RLMaterial,
    anchor: Anchor,
    accelerator: Accelerator,
    student: Replicated | Sharded,
) -> AnchorTeacher:
    """Return a teacher source that scores rollouts with the anchor.

    For forward KL without a teacher, the head ids are the anchor's top-k. Otherwise they are the
    head ids of the rollouts.
    """
    method = config.method
    own_head = method.direction == "forward" and config.teacher is None
    return AnchorTeacher(
        anchor,
        student,
        accelerator,
        temperature=method.temperature,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        top_k=max(method.top_k, 1) if own_head else None,
        prompt=context_prompt(config, material.tokenizer, material.max_length),
    )


class OldPolicy:
    """Computes log-probs of sampled tokens under p_old, the student before a step's first update.

    PPO's ratio compares the student with p_old. The log-probs that the sampler recorded cannot
    replace those of p_old: in bfloat16, two programs compute different log-probs from the same
    weights, and the ratios of full answers would exceed the clip bounds of GSPO. So the trainer's
    own forward pass computes them.
    """

    def __init__(
        self, student: Replicated | Sharded, *, temperature: float, tokens_per_micro_batch: int
    ) -> None:
        self._student = student
        self._temperature = temperature
        self._tokens_per_micro_batch = tokens_per_micro_batch

    def __call__(self, updates: Sequence[Sequence[Rollout]]) -> list[list[Tensor]]:
        """Collective. Return log-probs [learned] float32 on the CPU for each rollout, in nats.

        `updates`: the rollouts of each update. Each update has the same micro-batches as in
        training, because other micro-batches would round differently. Call this outside
        `student.gathered()`.
        """
        student = self._student

        def logprobs(batch: Batch) -> Tensor:
            return student.rows(batch, self._temperature)[1].token_logprobs.cpu()

        student.trained.train()  # as in the update
        logprobs_of_updates = [
            run_passes_over_rollouts(
                student, rollouts, logprobs, tokens_per_micro_batch=self._tokens_per_micro_batch
            )
            for rollouts in updates
        ]
        student.trained.eval()
        return logprobs_of_updates
