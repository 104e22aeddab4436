"""Puts a trainer together from its job: what is loaded, in what order, and from where."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from clients.config import JobConfig
from clients.run_directory import RunDirectory
from clients.teacher_client import TeacherClient, TeacherInfo
from student_trainer import checkpoint
from student_trainer.distillation import direction_of
from student_trainer.evaluate import Evaluation
from student_trainer.metrics import MetricsLog
from student_trainer.model import Student, load_config, load_model, load_tokenizer, vocabulary
from student_trainer.preflight import check_vocabulary
from student_trainer.progress import Progress
from student_trainer.prompts import load_prompts
from student_trainer.rollouts import HuggingFaceRollouts
from student_trainer.teachers import RemoteTeacher
from student_trainer.trainer import Parts, Trainer

log = logging.getLogger(__name__)


def assemble(
    config: JobConfig,
    run: RunDirectory,
    client: TeacherClient,
    info: TeacherInfo,
    progress: Progress,
    attempt: int,
    from_step: int | None,
) -> Trainer:
    """A trainer that goes on from the newest good checkpoint (or `from_step`), or from the start.

    Raises a DistillError for everything that a user can mend, before the first step.
    """
    tokenizer = load_tokenizer(config.student)
    width = load_config(config.student).get_text_config().vocab_size
    check_vocabulary(client, info, vocabulary(tokenizer), width)
    prompts, held_out, too_long = load_prompts(
        config.data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
    )
    if too_long:
        log.warning("%d prompts are longer than method.max_prompt_tokens: left out", too_long)
    found = checkpoint.newest_checkpoint(run.checkpoints, from_step)
    if from_step is not None:
        checkpoint.delete_after(run.checkpoints, from_step)

    step, saved = found if found else (0, None)
    progress.say("loading student", step)
    torch.manual_seed(config.seed)  # dropout and new weights: the same each time
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    progress.agree = lambda wish: _largest(accelerator, wish)
    model = load_model(config.student, saved / "model" if saved else None)
    model.to(accelerator.device)
    rollouts, teacher = _sources(config, client, model, tokenizer)
    evaluation = Evaluation(config, held_out, accelerator, tokenizer, rollouts, teacher)
    metrics = None
    if accelerator.is_main_process:
        board = config.track.tensorboard
        metrics = MetricsLog(run, attempt=attempt, last_step=step or None, tensorboard=board)
    log.info("%s on %s, teacher %s, step %d", config.student.model, model.device, info.model, step)
    return Trainer(
        config,
        run,
        progress,
        Parts(
            step=step,
            accelerator=accelerator,
            student=Student(model),
            optimizer=_optimizer(config, model, saved),
            tokenizer=tokenizer,
            prompts=prompts,
            rollouts=rollouts,
            teacher=teacher,
            evaluation=evaluation,
            metrics=metrics,
        ),
    )


def _sources(
    config: JobConfig, client: TeacherClient, model: Any, tokenizer: Any
) -> tuple[HuggingFaceRollouts, RemoteTeacher]:
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
    )
    teacher = RemoteTeacher(
        client,
        config.teacher,
        student_head=student_head,
        temperature=config.method.temperature,
    )
    return rollouts, teacher


def _optimizer(config: JobConfig, model: Any, saved: Path | None) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )
    if saved is not None:
        checkpoint.load_optimizer(saved, model, optimizer)
    return optimizer


def _largest(accelerator: Accelerator, number: int) -> int:
    if accelerator.num_processes == 1:
        return number
    mine = torch.tensor([number], device=accelerator.device)
    return int(accelerator.gather(mine).max())
