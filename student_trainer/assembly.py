"""Puts a trainer together from its job: what is loaded, in what order, and from where."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from clients.config import JobConfig
from clients.run_directory import RunDirectory
from clients.run_progress import Progress
from protos.errors import InvalidInput
from student_trainer import checkpoint
from student_trainer.connections import Connection
from student_trainer.distillation import direction_of
from student_trainer.evaluate import Evaluation
from student_trainer.metrics import open_metrics
from student_trainer.model import Student, load_config, load_model, load_tokenizer, vocabulary
from student_trainer.parallel import spread
from student_trainer.preflight import check_length, check_vocabulary
from student_trainer.processes import largest, make_accelerator
from student_trainer.prompts import Prompt, PromptSet, load_prompts
from student_trainer.rollouts import HuggingFaceRollouts
from student_trainer.teachers import RemoteTeacher, TeachersByName, TeacherSource
from student_trainer.trainer import Parts, Trainer

log = logging.getLogger(__name__)


def assemble(
    config: JobConfig,
    run: RunDirectory,
    teachers: Mapping[str, Connection],
    progress: Progress,
    attempt: int,
    from_step: int | None,
) -> Trainer:
    """A trainer that goes on from the newest good checkpoint (or `from_step`), or from the start.

    Raises a DistillError for everything that a user can mend, before the first step.
    """
    disable_progress_bar()  # they would fill the log, at every checkpoint
    tokenizer = load_tokenizer(config.student)
    shape = load_config(config.student).get_text_config()
    tokens = vocabulary(tokenizer)
    for connection in teachers.values():
        check_vocabulary(connection, tokens, shape.vocab_size)
    check_length(config, "student", getattr(shape, "max_position_embeddings", None))
    prompts, held_out = _prompts(config, tokenizer)
    step, saved = _resumed(config, run, from_step)

    progress.say("loading student", step)
    torch.manual_seed(config.seed)  # new weights, if there are any: the same each time
    accelerator = make_accelerator()
    progress.agree = lambda wish: largest(accelerator, wish)
    if accelerator.is_main_process:
        # Later ones are damaged, or of another course than the one that begins here.
        checkpoint.delete_after(run.checkpoints, step)
    model = load_model(config.student, saved / "model" if saved else None)
    bf16 = config.student.dtype == "bfloat16"
    student = spread(accelerator, Student(model, bf16=bf16), config.train.sharding)
    rollouts, teacher = _sources(config, teachers, student.whole.model, tokenizer)
    evaluation = Evaluation(config, held_out, accelerator, tokenizer, rollouts, teacher)
    metrics = None
    if accelerator.is_main_process:
        board = config.track.tensorboard
        metrics = open_metrics(run, attempt=attempt, last_step=step or None, tensorboard=board)
    where = f"{config.student.model} on {accelerator.device}"
    models = ", ".join(connection.info.model for connection in teachers.values())
    log.info("%s, teacher %s, step %d", where, models, step)
    return Trainer(
        config,
        run,
        progress,
        Parts(
            step=step,
            accelerator=accelerator,
            student=student,
            optimizer=_optimizer(config, student.trained.model, saved),
            tokenizer=tokenizer,
            prompts=prompts,
            rollouts=rollouts,
            teacher=teacher,
            evaluation=evaluation,
            metrics=metrics,
        ),
    )


def _resumed(
    config: JobConfig, run: RunDirectory, from_step: int | None
) -> tuple[int, Path | None]:
    """The step to go on from and its checkpoint; (0, None) for a new run."""
    found = checkpoint.newest_checkpoint(run.checkpoints, from_step)
    if found is None:
        return 0, None
    if found[0] > config.max_steps:
        raise InvalidInput(
            f"the run is at step {found[0]} already, max_steps is {config.max_steps}",
            field="max_steps",
            hint="raise it, or resume from an earlier checkpoint",
        )
    return found


def _prompts(config: JobConfig, tokenizer: Any) -> tuple[PromptSet, list[Prompt]]:
    prompts, held_out, too_long = load_prompts(
        config.data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
        teachers=config.teachers,
    )
    if too_long:
        log.warning("%d prompts are longer than method.max_prompt_tokens: left out", too_long)
    if len(held_out) < config.train.processes:
        raise InvalidInput(
            f"{len(held_out)} held-out prompts cannot be shared by {config.train.processes} "
            "processes",
            field="data.eval_path" if config.data.eval_path else "data.path",
            hint="give more prompts, or lower train.processes",
        )
    return prompts, held_out


def _sources(
    config: JobConfig, teachers: Mapping[str, Connection], model: Any, tokenizer: Any
) -> tuple[HuggingFaceRollouts, TeacherSource]:
    """Who writes and who scores. Reverse KL is over the student's top-k, forward the teacher's."""
    student_head = direction_of(config.method) == "reverse"
    rollouts = HuggingFaceRollouts(
        model,
        tokenizer,
        top_k=config.teacher.top_k if student_head else 0,
        temperature=config.method.temperature,
        max_new_tokens=config.method.max_new_tokens,
        # Sampling keeps no activations: it can take larger batches than training.
        batch_tokens=4 * config.train.tokens_per_micro_batch,
        bf16=config.student.dtype == "bfloat16",
    )
    remote = {
        name: RemoteTeacher(
            connection.client,
            config.teacher,
            student_head=student_head,
            temperature=config.method.temperature,
        )
        for name, connection in teachers.items()
    }
    return rollouts, TeachersByName(remote)


def _optimizer(config: JobConfig, model: Any, saved: Path | None) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )
    if saved is not None:
        checkpoint.load_optimizer(saved, model, optimizer)
    return optimizer
