"""Builds a Trainer from a job.

The order is: load the tokenizer; prepare the method (`methods/`), which reads and checks the data;
find the newest intact checkpoint; load the student; build the method with its teacher sources,
anchor and objective; build the optimizer; open the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from clients.config.kinds import AnyTraining
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.preflight.limits import NO_LIMITS, add_limit, read_limits
from clients.preflight.parallel import refuse_indivisible_heads
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress, write_preview
from protos.errors import InvalidInput
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.copies import RunCopies
from student_trainer.checkpoints.model_directory import check_same_tokenizer, read_source_files
from student_trainer.data.captured_stores import TrainingStore, check_same_store
from student_trainer.loop.learner import Method
from student_trainer.loop.optimizer import make_optimizer
from student_trainer.loop.trainer import Trainer
from student_trainer.methods import offline, on_policy, rl, sft
from student_trainer.methods.preparation import Inputs, Preparation
from student_trainer.model.loading import (
    computes_in_bfloat16,
    count_weights,
    load_config,
    load_model,
    load_tokenizer,
    local_directory,
    require_trainable,
)
from student_trainer.model.student import Student, compile_layers
from student_trainer.parallel.collectives import (
    make_accelerator,
    max_over_ranks,
    raise_on_all_ranks,
    time_limit,
)
from student_trainer.parallel.launcher import is_main_process
from student_trainer.parallel.sharding import Replicated, Sharded, distribute
from student_trainer.parallel.tensor_parallel import check_divisible
from student_trainer.preview import preview_of
from student_trainer.rewards import Rewards
from student_trainer.rollout_client.connection import connect_engine, wait_for_shared_gpus
from student_trainer.rollout_client.failed_orders import end_orders_after_stop
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.placed_services import PlacedServices
from student_trainer.run.chat_templates import choose_chat_template
from student_trainer.run.metrics import open_metrics
from student_trainer.run.model_checks import max_sequence_length
from student_trainer.run.provenance import write_environment
from student_trainer.run.self_test import run_self_test, samples_in_trainer
from student_trainer.teachers.connections import (
    Connection,
    describe_changed_teachers,
    teacher_facts,
)
from student_trainer.teachers.stop_watch import end_requests_after_stop

log = logging.getLogger(__name__)


def assemble(
    config: AnyTraining,
    run: RunDirectory,
    teachers: Mapping[str, Connection],
    progress: Progress,
    attempt: int,
    from_step: int | None,
    rewards: Rewards | None = None,
    service: RolloutServices | PlacedServices | None = None,
) -> Trainer:
    """Collective. Return the trainer of an attempt, with all its parts loaded.

    The trainer resumes from the newest intact checkpoint, or starts at step 0 if there is none.

    - `teachers`: the connections by teacher name.
    - `from_step`: resume from the checkpoint of this step, and delete all later checkpoints; None:
      resume from the newest one.
    - `rewards`: scores the answers; None if the job has no reward.
    - `service`: the rollout services that sample answers; None if this process samples them.

    Raises a DistillError if the job, its data or its checkpoints cannot be used.
    """
    disable_progress_bar()  # progress bars of every checkpoint would fill the log
    tokenizer = load_tokenizer(config.student)
    infos = {name: teacher.info for name, teacher in teachers.items()}
    warnings = choose_chat_template(config, tokenizer, infos)
    source_files: Mapping[str, bytes] = {}
    if is_main_process():
        source_files = read_source_files(local_directory(config.student), tokenizer.chat_template)
        limits = read_limits(run.path) or NO_LIMITS
        if not run.checkpoint_steps():  # training begins anew; the data may have been mended
            run.preview.unlink(missing_ok=True)
        # Before the checks of the data, which may refuse it.
        write_preview(
            run,
            lambda: preview_of(config, tokenizer=tokenizer, warnings=warnings, limits=limits),
        )
    text_config = _check_student(config)
    width, max_length = text_config.vocab_size, max_sequence_length(text_config)
    preparation = _prepare_method(config, Inputs(tokenizer, width, max_length, teachers, rewards))
    config = _count_steps(config, preparation, run)
    progress.expect(config.max_steps)
    accelerator = _build_accelerator(config)
    copies = RunCopies(config, run, attempt, accelerator, progress)
    progress.agree = lambda wish: max_over_ranks(accelerator, wish)
    copies.fetch(from_step)
    step, checkpoint_path = _find_resumed_checkpoint(config, run, from_step, copies)
    if preparation.store is not None and checkpoint_path is not None:
        check_same_store(preparation.store, checkpoint.read_facts(checkpoint_path))
    if checkpoint_path is not None:
        saved = checkpoint_path / "model"
        raise_on_all_ranks(accelerator, lambda: check_same_tokenizer(saved, source_files))
    progress.say("loading student", step)
    wait_for_shared_gpus(config, service, accelerator)
    student = _load_student(config, checkpoint_path, accelerator, preparation, tokenizer)
    if accelerator.is_main_process:
        # Later checkpoints are damaged, or are replaced by the steps of this attempt.
        checkpoint.delete_after(run.checkpoints, step)
    copies.resume_from(step)
    for teacher in teachers.values():
        end_requests_after_stop(teacher.client, progress.stop_asked)
    engine = connect_engine(config, service, accelerator, student, run.path, attempt, tokenizer)
    if engine is not None:
        end_orders_after_stop(engine.client, progress.stop_asked)
    method = preparation.build(config, accelerator, student, engine)
    method = replace(method, facts={**method.facts, **teacher_facts(teachers)})
    optimizer = make_optimizer(config.train, student.trained.model)
    if checkpoint_path is not None:
        facts = checkpoint.read_facts(checkpoint_path)
        for sentence in describe_changed_teachers(teachers, facts, step):
            progress.note(sentence)
        _restore_method(method, checkpoint_path)
        checkpoint.load_optimizer(checkpoint_path, student.trained.model, optimizer)
    _log_start(config, teachers, preparation.store, student, step)
    return Trainer(
        config,
        run,
        progress,
        method,
        step=step,
        accelerator=accelerator,
        student=student,
        optimizer=optimizer,
        tokenizer=tokenizer,
        source_files=source_files,
        copies=copies,
        metrics=_open_log(config, run, accelerator, attempt, step),
        resumed_metrics=checkpoint.read_metrics(checkpoint_path) if checkpoint_path else None,
    )


def _check_student(config: AnyTraining) -> Any:
    """Return the configuration of the student's text model.

    Raises a DistillError if the job cannot train this model: quantised weights, or a shape that the
    parallelism of the job cannot divide.
    """
    if config.train.tensor_parallel > 1:
        check_divisible(config.student, config.train.tensor_parallel)
    require_trainable(config.student)
    text_config = load_config(config.student).get_text_config()
    refuse_indivisible_heads(text_config.to_dict(), config.train.context_parallel)
    return text_config


def _prepare_method(config: AnyTraining, inputs: Inputs) -> Preparation:
    """Read and check the job's data with the `prepare` function of the job's method.

    The weights are loaded later, so a job with invalid data fails early. Raises a DistillError.
    """
    match config:
        case OnPolicyJob():
            return on_policy.prepare(config, inputs)
        case OfflineJob():
            return offline.prepare(config, inputs)
        case RLJob():
            return rl.prepare(config, inputs)
        case SFTJob():
            return sft.prepare(config, inputs)
        case _:
            assert_never(config)


def _count_steps(config: AnyTraining, preparation: Preparation, run: RunDirectory) -> AnyTraining:
    """Return the job with `max_steps` set to the number of its steps.

    If the job gives the number of epochs instead, the number of steps is also written to the run
    directory. Later attempts read it there.
    """
    steps = config.count_steps(preparation.epoch_size)
    if config.max_steps == 0 and is_main_process():
        add_limit(run.path, "max_steps", steps, config.describe_epochs(preparation.epoch_size))
    return config.model_copy(update={"max_steps": steps})


def _build_accelerator(config: AnyTraining) -> Accelerator:
    limit = time_limit(config, count_weights(config.student))
    return make_accelerator(limit, cpu_offload=config.train.cpu_offload)


def _open_log(
    config: AnyTraining, run: RunDirectory, accelerator: Accelerator, attempt: int, step: int
) -> MetricsLog | None:
    """Write the environment of the attempt, and return the metrics log; return None in other
    processes than the main process.
    """
    if not accelerator.is_main_process:
        return None
    write_environment(run, attempt=attempt, processes=accelerator.num_processes)
    return open_metrics(run, attempt=attempt, last_step=step or None, track=config.track)


def _log_start(
    config: AnyTraining,
    teachers: Mapping[str, Connection],
    store: TrainingStore | None,
    student: Replicated | Sharded,
    step: int,
) -> None:
    dtype = "bfloat16" if student.trained.bf16 else "float32"
    models = [f"{config.student.model} on {student.device} in {dtype}"]
    models += [f"teacher {connection.info.model}" for connection in teachers.values()]
    log.info("%s, step %d", ", ".join(models + ([store.label] if store else [])), step)


def _load_student(
    config: AnyTraining,
    checkpoint_path: Path | None,
    accelerator: Accelerator,
    preparation: Preparation,
    tokenizer: Any,
) -> Replicated | Sharded:
    """Collective. Load the student, distribute it, choose its attention, test it, and compile it.

    `checkpoint_path`: the checkpoint that contains the weights; None: load the weights from
    `student.model`. The student is compiled only if `student.compile` is true.
    """
    reader = preparation.images
    torch.manual_seed(config.seed)  # new LoRA weights are the same in every attempt
    train = config.train
    directory = checkpoint_path / "model" if checkpoint_path else None
    model = load_model(config.student, directory, mapped=train.sharded, images=reader)
    unwrapped = Student(
        model,
        bf16=computes_in_bfloat16(config.student),
        vocab_size=preparation.vocab_size,
        placeholder=None if reader is None else reader.placeholder,
    )
    groups = train.tensor_parallel, train.context_parallel
    student = distribute(
        accelerator, unwrapped, train.sharding, *groups, cpu_offload=train.cpu_offload
    )
    student.choose_attention(config.student)
    if reader is not None:  # image positions assume that each sequence has a line of its own
        student.trained.layout = student.full.layout = "padded"
    run_self_test(student, tokenizer, accelerator, samples=samples_in_trainer(config))
    if config.student.compile:
        compile_layers(student.trained)
    return student


def _restore_method(method: Method, checkpoint_path: Path) -> None:
    """Load the state of the method from a checkpoint.

    The state is the anchor, the critic, and the rollouts that were sampled for later steps.
    """
    if method.anchor is not None:
        checkpoint.load_anchor(checkpoint_path, method.anchor)
    if method.critic is not None:
        checkpoint.load_critic(checkpoint_path, method.critic)
    if method.rollouts_ahead is not None:
        method.rollouts_ahead.restore(checkpoint_path)


def _find_resumed_checkpoint(
    config: AnyTraining, run: RunDirectory, from_step: int | None, copies: RunCopies
) -> tuple[int, Path | None]:
    """Collective. Return (step, directory) of the checkpoint to resume from; (0, None) for a new
    run.

    Raises InvalidInput (`max_steps`) if the checkpoint is later than the last step of the job.
    """
    resumed = checkpoint.newest_checkpoint(run.checkpoints, from_step, intact=copies.is_intact)
    if resumed is None:
        return 0, None
    if resumed[0] > config.max_steps:
        raise InvalidInput(
            f"the run is already at step {resumed[0]}, but max_steps is {config.max_steps}",
            field="max_steps",
            hint="raise max_steps, or resume from an earlier checkpoint",
        )
    return resumed
