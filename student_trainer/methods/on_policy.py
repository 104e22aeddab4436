"""On-policy distillation: the student samples completions, and the teacher scores them.

One step, in order:

1. Prompts. `PromptSet.of_step` (`data/prompts.py`) selects `train.prompts_per_step` prompts by the
   seed and the step number. Each prompt is repeated `method.rollouts_per_prompt` times. Each of n
   processes takes every n-th prompt, starting at its rank.
2. Rollouts. `HuggingFaceRollouts` (`rollouts/rollouts.py`) samples one completion for each prompt:
   `SampledTokens` (`rollouts/sampler.py`) -> `Rollout` (`data/sequence.py`).
3. Rows. `ScoredRollouts` (`teachers/scored_rollouts.py`) sends each batch of rollouts to the
   teacher service (`teachers/remote.py`) while the next batch is sampled: `Rollout` ->
   `PendingRows` (`teachers/source.py`). With reverse KL the teacher scores the student's top-k ids,
   which the sampler recorded, and ids that the sampler drew from the student's tail
   (`rollouts/sample_step.py`, tail mode `bucket+draws`). With forward KL the teacher scores its own
   top-k ids, and ids that it draws from its own tail (`bucket+teacher_samples`).
4. Micro-batches. The learner (`loop/learner.py`) groups the sequences (`data/packing.py`), waits
   for the rows of one group (`PendingRows` -> `ScoredSequence`) and makes its tensors
   (`ScoredSequence` -> `Batch`, both in `data/batch.py`).
5. Loss. `DistillationObjective` (`objectives/distillation.py`) computes the Top-k KL of each token
   (`losses/topk.py`) from the rows of the teacher and of the student (`model/student.py`, which
   calls `losses/fused/linear_loss.py`). A teacher with another tokenizer (`teacher.tokenizer`)
   reads its own tokens of the prompt and the completion (`cross_tokenizer/teacher.py`). The loss is
   then the cost of words or answers (`cross_tokenizer/objectives.py`, `cross_tokenizer/losses.py`).
6. Update. The trainer averages over all tokens of all processes, clips the gradient and runs AdamW.

`prepare` reads and checks the data that the job needs, and `build` connects these parts.
`assembly.py` calls both once when an attempt starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate import Accelerator

from clients.config.on_policy import OnPolicyJob
from clients.preflight.limits import check_lengths
from student_trainer.cross_tokenizer.comparison import (
    SpecialTokenPair,
    TokenizerPair,
    build_teacher_input,
)
from student_trainer.cross_tokenizer.objectives import CrossTokenizerObjective
from student_trainer.cross_tokenizer.teacher import CrossTokenizerTeacher
from student_trainer.data.prompts import ItemsOfSteps, Prompt, load_prompts
from student_trainer.loop.learner import Method
from student_trainer.loop.step import Step
from student_trainer.methods.preparation import (
    Inputs,
    Preparation,
    check_shares,
    held_out_evaluation,
    load_prompt_images,
    pair_tokenizers,
    plain_rollouts,
    sampling_settings,
)
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.run.model_checks import check_top_k
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import RolloutsOfSteps, ScoredRollouts
from student_trainer.teachers.source import PendingRows, TeachersByName, TeacherSource
from student_trainer.teachers.teacher_input import teacher_prompt


class OnPolicySteps:
    """Returns the sequences of each step. The student samples all of them."""

    def __init__(
        self,
        config: OnPolicyJob,
        accelerator: Accelerator,
        prompts: ItemsOfSteps[Prompt],
        held_out: Sequence[Prompt],
        training: RolloutsOfSteps,
        answers: ScoredRollouts,
    ) -> None:
        """Set up the steps.

        - prompts: the training prompts.
        - held_out: the held-out prompts of all processes; this process uses its share.
        - training: samples the rollouts of training steps.
        - answers: samples the held-out rollouts.
        """
        self._accelerator = accelerator
        self._prompts = prompts
        self._training = training
        self._answers = answers
        self._prompts_per_step = config.train.prompts_per_step
        self._rollouts_per_prompt = config.method.rollouts_per_prompt
        rank, world = accelerator.process_index, accelerator.num_processes
        self._held_out = held_out[rank::world]
        # Negative: training rollouts are numbered from 0, and a number fixes the random stream.
        self._held_out_numbers = [-1 - i for i in range(len(held_out))][rank::world]

    def of_step(self, step: int) -> Step:
        """Collective. Sample this process's rollouts of `step` (from 1) and request their rows."""
        pending = self._training.of_step(step, self._select_prompts)
        self._answers.finish()
        return Step([pending], self._training.metrics(step, pending))

    def _select_prompts(self, step: int) -> tuple[list[Prompt], list[int]]:
        """Return this process's prompts of a step, and the rollout number of each prompt."""
        prompts = [
            prompt
            for prompt in self._prompts.of_step(step, self._prompts_per_step)
            for _ in range(self._rollouts_per_prompt)
        ]
        own_indices = range(
            self._accelerator.process_index, len(prompts), self._accelerator.num_processes
        )
        first = (step - 1) * len(prompts)
        return [prompts[i] for i in own_indices], [first + i for i in own_indices]

    def held_out(self) -> list[PendingRows]:
        """Sample this process's held-out rollouts and request their rows. Not collective.

        Call it inside `student.gathered()`. The prompts and the random numbers are the same at
        every call, so that evaluations at different steps are comparable.
        """
        return self._answers.sample_and_score(self._held_out, self._held_out_numbers)


def prepare(config: OnPolicyJob, inputs: Inputs) -> Preparation:
    """Compare the tokenizers of student and teachers, and load the prompts."""
    images = load_prompt_images(config)
    pair, vocab_size = pair_tokenizers(config, inputs)
    check_lengths(config, "student", inputs.max_length)
    prompts = load_prompts(
        config.data,
        inputs.tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
        teachers=config.teachers,
        with_fields=config.reads_all_columns,
        reader=images,
        vision_teachers=[
            name for name, teacher in inputs.teachers.items() if teacher.info.takes_images
        ],
        model_ids=inputs.model_ids,
    )
    check_shares(config.data, config.processes, len(prompts[1]))
    if isinstance(pair, TokenizerPair):
        pair.log_facts(prompts[1])
    else:
        check_top_k(config.top_k, vocab_size, "teacher.top_k")
    return Preparation(
        vocab_size,
        prompts[0].epoch_size,
        lambda job, *parts: build(job, inputs, prompts, pair, *parts),
        images,
    )


def build(
    config: OnPolicyJob,
    inputs: Inputs,
    prompts: tuple[ItemsOfSteps[Prompt], list[Prompt]],
    pair: TokenizerPair | SpecialTokenPair | None,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    engine: EngineConnection | None,
) -> Method:
    """Build the method of an on-policy job. The module docstring lists the steps.

    - prompts: the training prompts and the held-out prompts.
    - pair: the tokenizers of teacher and student, if they differ.
    - engine: samples the rollouts; None: this process samples.

    For reverse KL, the head of a row is the student's top-k, unless the job selects the teacher's.
    For forward KL, the head is the teacher's top-k.
    """
    teachers, tokenizer = inputs.teachers, inputs.tokenizer
    objective: DistillationObjective | CrossTokenizerObjective
    objective = DistillationObjective.on_policy(config.method, tuple(config.teachers))
    settings = sampling_settings(
        config,
        student,
        top_k=config.top_k if config.method.student_head else 0,
        temperature=objective.temperature,
        draws=config.draws,
    )
    teacher: TeacherSource
    if not isinstance(pair, TokenizerPair):
        sources = _make_remote_teachers(config, teachers, student.full.vocab_size, tokenizer, pair)
        teacher = TeachersByName(sources)
    else:
        objective = CrossTokenizerObjective(config.method.horizon, objective.temperature)
        # A row needs a head, but the loss reads none.
        settings = replace(settings, top_k=1, draws=0)
        teacher = CrossTokenizerTeacher(
            teachers[""].client,
            pair.aligner,
            teacher_prompt(config, pair.tokenizer),
            temperature=config.method.temperature,
            max_length=teachers[""].info.max_length,
        )
    engine_rollouts = None if engine is None else engine.rollouts(settings)
    rollouts: Rollouts = engine_rollouts or plain_rollouts(config, student, tokenizer, settings)
    answers = ScoredRollouts(student, rollouts, teacher, config.seed)
    training, held_out = prompts
    rollouts_ahead = (
        engine.rollouts_ahead(config, teacher, engine_rollouts)
        if engine and engine_rollouts
        else None
    )
    steps = OnPolicySteps(
        config, accelerator, training, held_out, rollouts_ahead or answers, answers
    )
    evaluation = held_out_evaluation(
        config,
        accelerator,
        objective,
        steps.held_out,
        held_out,
        tokenizer,
        rollouts,
    )
    return Method(objective, steps.of_step, evaluation, rollouts_ahead=rollouts_ahead)


def _make_remote_teachers(
    config: OnPolicyJob,
    teachers: Mapping[str, Connection],
    vocab_size: int,
    tokenizer: Any,
    pair: SpecialTokenPair | None,
) -> dict[str, TeacherSource]:
    """Return the teacher services by name.

    `vocab_size`: the number of ids that the rows cover.
    """
    return {
        name: RemoteTeacher(
            connection.client,
            top_k=None if config.method.student_head else config.top_k,
            temperature=config.method.temperature,
            f32=config.teacher.logprob_format == "f32",
            tail_samples=config.tail_samples,
            vocab_size=connection.narrowed_vocab_size(vocab_size),
            teacher_input=build_teacher_input(config, connection, vocab_size, tokenizer, pair),
        )
        for name, connection in teachers.items()
    }
