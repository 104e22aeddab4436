"""Builds a Trainer from a job.

Order: tokenizer, data and checks; newest intact checkpoint; student; method (`methods/`), which
builds the teacher sources, the anchor and the objective; optimizer; metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from clients.config.kinds import AnyTraining
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from clients.config.tables.common import StudentConfig
from clients.data.images import ImageReader
from clients.preflight.parallel import refuse_indivisible_heads
from clients.preflight.teachers import check_length
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import MetricsLog
from clients.runs.progress import Progress, write_preview
from protos.errors import DistillError, InvalidInput
from student_trainer.checkpoints import checkpoint
from student_trainer.checkpoints.copies import RunCopies
from student_trainer.cross_tokenizer.comparison import (
    SpecialTokenPair,
    TokenizerPair,
    compare_tokenizers,
)
from student_trainer.cross_tokenizer.special_token_store import SpecialTokenStore
from student_trainer.cross_tokenizer.store import open_cross_tokenizer_store
from student_trainer.data.captured_stores import Stores, TrainingStore, check_same_store
from student_trainer.data.examples import load_examples
from student_trainer.data.prompts import ItemsOfSteps, ModelIds, Prompt, load_prompts
from student_trainer.environments.retriever import make_retriever
from student_trainer.loop.optimizer import make_optimizer
from student_trainer.loop.trainer import Parts, Trainer
from student_trainer.methods.method import Method
from student_trainer.methods.offline import load_task_prompts, offline_method
from student_trainer.methods.on_policy import on_policy_method
from student_trainer.methods.rl import rl_method
from student_trainer.methods.rl_parts import RLMaterial
from student_trainer.methods.rl_prompts import load_rl_prompts
from student_trainer.methods.sft import sft_method
from student_trainer.model.compilation import compile_layers
from student_trainer.model.loading import (
    computes_in_bfloat16,
    count_weights,
    load_config,
    load_image_reader,
    load_model,
    load_tokenizer,
    require_trainable,
    vocabulary,
)
from student_trainer.model.student import Student
from student_trainer.parallel.collectives import make_accelerator, max_over_ranks
from student_trainer.parallel.launcher import is_main_process
from student_trainer.parallel.sharding import Replicated, Sharded, distribute
from student_trainer.parallel.tensor_parallel import check_divisible
from student_trainer.parallel.time_limit import time_limit
from student_trainer.preview import preview_of
from student_trainer.rewards import Rewards
from student_trainer.rollout_client.connection import (
    EngineConnection,
    connect_engine,
    wait_for_shared_gpus,
)
from student_trainer.rollout_client.local_services import RolloutServices
from student_trainer.rollout_client.placed_services import PlacedServices
from student_trainer.rollout_client.stopped_job import end_orders_after_stop
from student_trainer.run.metrics import open_metrics
from student_trainer.run.model_checks import (
    check_max_tokens,
    check_stored_length,
    check_stored_vocabulary,
    check_stored_width,
    check_top_k,
    check_vocabulary,
    check_width,
    max_sequence_length,
)
from student_trainer.run.provenance import write_environment
from student_trainer.run.self_test import run_self_test, samples_in_trainer
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.teacher_input import reads_another_prompt

log = logging.getLogger(__name__)


def assemble(
    config: AnyTraining,
    run: RunDirectory,
    teachers: Mapping[str, Connection],
    stores: Stores | None,
    progress: Progress,
    attempt: int,
    from_step: int | None,
    rewards: Rewards | None = None,
    service: RolloutServices | PlacedServices | None = None,
) -> Trainer:
    """Collective. Return a trainer that resumes from the newest intact checkpoint, if there is one.

    `from_step`: resume from this step instead. Checkpoints of later steps are deleted. `stores`:
    None unless the job is offline. `service`: None if this process samples. Raises a DistillError.
    """
    disable_progress_bar()  # progress bars of every checkpoint would fill the log
    if is_main_process():
        write_preview(
            run, lambda: preview_of(config)
        )  # before the checks of the data, which may refuse it
    tokenizer, reader = load_tokenizer(config.student), _load_image_reader(config, stores)
    vocab_size, make_method = _prepare_method(config, teachers, stores, rewards, tokenizer, reader)
    accelerator = _build_accelerator(config)
    copies = RunCopies(config, run, attempt, accelerator, progress)
    progress.agree = lambda wish: max_over_ranks(accelerator, wish)
    copies.fetch(from_step)
    step, checkpoint_path = _find_resumed_checkpoint(config, run, from_step, copies)
    if stores is not None and checkpoint_path is not None:
        check_same_store(stores.training, checkpoint.read_facts(checkpoint_path))
    progress.say("loading student", step)
    wait_for_shared_gpus(config, service, accelerator)
    student = _load_student(config, checkpoint_path, accelerator, vocab_size, reader, tokenizer)
    if accelerator.is_main_process:
        # Later checkpoints are damaged, or are replaced by the steps of this attempt.
        checkpoint.delete_after(run.checkpoints, step)
    copies.resume_from(step)
    engine = connect_engine(config, service, accelerator, student, run.path, attempt, tokenizer)
    if engine is not None:
        end_orders_after_stop(engine.client, progress.stop_asked)
    method = make_method(accelerator, student, engine)
    optimizer = make_optimizer(config.train, student.trained.model)
    if checkpoint_path is not None:
        _restore_method(method, checkpoint_path)
        checkpoint.load_optimizer(checkpoint_path, student.trained.model, optimizer)
    _log_start(config, teachers, stores, student, step)
    parts = Parts(
        step=step,
        accelerator=accelerator,
        student=student,
        optimizer=optimizer,
        tokenizer=tokenizer,
        objective=method.objective,
        steps=method.steps,
        evaluation=method.evaluation,
        metrics=_open_log(config, run, accelerator, attempt, step),
        anchor=method.anchor,
        critic=method.critic,
        facts=method.facts,
        resumed_metrics=checkpoint.read_metrics(checkpoint_path) if checkpoint_path else None,
        rollouts_ahead=method.rollouts_ahead,
        copies=copies,
    )
    return Trainer(config, run, progress, parts)


def _build_accelerator(config: AnyTraining) -> Accelerator:
    limit = time_limit(config, count_weights(config.student))
    return make_accelerator(limit, cpu_offload=config.train.cpu_offload)


def _load_image_reader(config: AnyTraining, stores: Stores | None) -> ImageReader | None:
    """Return the reader of the images in the job's prompts; None if they have no images."""
    if isinstance(config, OfflineJob):
        open_stores = (stores.training, stores.held_out) if stores else ()
        has_images = any(store is not None and store.has_images for store in open_stores)
        return load_image_reader(config.student, "data.path") if has_images else None
    return load_image_reader(config.student) if config.data and config.data.image_column else None


def _open_log(
    config: AnyTraining, run: RunDirectory, accelerator: Accelerator, attempt: int, step: int
) -> MetricsLog | None:
    """In the main process, write the environment of the attempt, and return the metrics log."""
    if not accelerator.is_main_process:
        return None
    write_environment(run, attempt=attempt, processes=accelerator.num_processes)
    return open_metrics(run, attempt=attempt, last_step=step or None, track=config.track)


def _log_start(
    config: AnyTraining,
    teachers: Mapping[str, Connection],
    stores: Stores | None,
    student: Replicated | Sharded,
    step: int,
) -> None:
    dtype = "bfloat16" if student.trained.bf16 else "float32"
    models = [f"{config.student.model} on {student.device} in {dtype}"]
    models += [f"teacher {connection.info.model}" for connection in teachers.values()]
    log.info("%s, step %d", ", ".join(models + ([stores.training.label] if stores else [])), step)


def _load_student(
    config: AnyTraining,
    checkpoint_path: Path | None,
    accelerator: Accelerator,
    vocab_size: int,
    reader: ImageReader | None,
    tokenizer: Any,
) -> Replicated | Sharded:
    """Collective. Load the student, distribute it, choose its attention, test and compile it.

    `checkpoint_path`: the checkpoint with the weights; None: load those that the job names.
    `vocab_size`: number of ids that teacher and student have in common. `reader`: the reader of the
    job's images; None if it has none.
    """
    torch.manual_seed(config.seed)  # new LoRA weights are the same in every attempt
    train = config.train
    directory = checkpoint_path / "model" if checkpoint_path else None
    model = load_model(config.student, directory, mapped=train.sharded, images=reader)
    unwrapped = Student(
        model,
        bf16=computes_in_bfloat16(config.student),
        vocab_size=vocab_size,
        placeholder=None if reader is None else reader.placeholder,
    )
    groups = train.tensor_parallel, train.context_parallel
    student = distribute(
        accelerator, unwrapped, train.sharding, *groups, cpu_offload=train.cpu_offload
    )
    student.choose_attention(config.student)
    if reader is not None:  # image positions assume that each sequence has a line of its own
        student.trained.layout = student.full.layout = "padded"
    run_self_test(student, tokenizer, samples=samples_in_trainer(config))
    if config.student.compile:
        compile_layers(student.trained)
    return student


def _restore_method(method: Method, checkpoint_path: Path) -> None:
    """Load the method's state from a checkpoint: anchor, critic, rollouts of later steps."""
    if method.anchor is not None:
        checkpoint.load_anchor(checkpoint_path, method.anchor)
    if method.critic is not None:
        checkpoint.load_critic(checkpoint_path, method.critic)
    if method.rollouts_ahead is not None:
        method.rollouts_ahead.restore(checkpoint_path)


MakeMethod = Callable[[Accelerator, Replicated | Sharded, EngineConnection | None], Method]


def _prepare_method(
    config: AnyTraining,
    teachers: Mapping[str, Connection],
    stores: Stores | None,
    rewards: Rewards | None,
    tokenizer: Any,
    reader: ImageReader | None,
) -> tuple[int, MakeMethod]:
    """Read and check the job's data and the student's configuration.

    Returns the number of token ids that rows cover, and a function that builds the method. No
    weights are loaded here, so that wrong data fails fast. Raises a DistillError.
    """
    if config.train.tensor_parallel > 1:
        check_divisible(config.student, config.train.tensor_parallel)
    require_trainable(config.student)
    text_config = load_config(config.student).get_text_config()
    refuse_indivisible_heads(text_config.to_dict(), config.train.context_parallel)
    max_length = max_sequence_length(text_config)
    if isinstance(config, OfflineJob):
        assert stores is not None
        return _prepare_offline(config, teachers, stores, tokenizer, text_config, reader)
    model_ids = ModelIds.of_tokenizer(tokenizer, text_config.vocab_size)
    pair = None
    if isinstance(config, OnPolicyJob | RLJob):
        pair = compare_tokenizers(config, teachers, tokenizer)
    if pair is None:
        vocab_size = _count_common_ids(
            teachers, stores, vocabulary(tokenizer), text_config.vocab_size
        )
    elif isinstance(pair, SpecialTokenPair):
        vocab_size = check_width(teachers[""], pair.tokens, text_config.vocab_size)
    else:
        vocab_size = min(text_config.vocab_size, pair.tokens)  # later ids are padding
    if isinstance(config, SFTJob):
        check_max_tokens(config.method.max_tokens, max_length)
        examples = load_examples(config, tokenizer, model_ids)
        held_out = examples[1]
        _check_shares(config, len(held_out))
        if config.eval.metric != "none":
            longest = max(len(example.prompt.ids) for example in held_out)
            check_length(longest + config.method.max_new_tokens, "student", max_length)
        return vocab_size, lambda accelerator, student, _: sft_method(
            config, examples, accelerator, student, tokenizer
        )
    check_length(
        config.method.max_prompt_tokens + config.method.max_new_tokens, "student", max_length
    )
    if isinstance(config, RLJob):
        check_top_k(config.method.top_k, vocab_size, "method.top_k")
        prompts = load_rl_prompts(config, tokenizer, reader, model_ids)
        _check_shares(config, len(prompts.held_out))
        retriever = make_retriever(config.environment) if config.environment else None
        assert not isinstance(pair, TokenizerPair), "compare_tokenizers refuses it"
        material = RLMaterial(tokenizer, prompts, teachers, rewards, retriever, max_length, pair)
        return vocab_size, lambda accelerator, student, engine: rl_method(
            config, material, accelerator, student, engine
        )
    return vocab_size, _prepare_on_policy(config, teachers, tokenizer, vocab_size, pair, reader)


def _prepare_offline(
    config: OfflineJob,
    teachers: Mapping[str, Connection],
    stores: Stores,
    tokenizer: Any,
    text_config: Any,
    reader: ImageReader | None,
) -> tuple[int, MakeMethod]:
    """Prepare an offline job; see `_prepare_method`.

    `text_config`: the configuration of the student's text model.
    """
    store, max_length = stores.training, max_sequence_length(text_config)
    alignment = open_cross_tokenizer_store(config, stores, tokenizer, max_length)
    if alignment is None:
        vocab_size = _count_common_ids(
            teachers, stores, vocabulary(tokenizer), text_config.vocab_size
        )
        check_stored_length(store, max_length)
    elif isinstance(alignment, SpecialTokenStore):
        vocab_size = check_stored_width(store, alignment.tokens, text_config.vocab_size)
    else:
        vocab_size = min(text_config.vocab_size, alignment.tokens)
    longest = store.longest
    if config.teacher is not None or config.eval.metric != "none":
        check_length(longest + config.method.max_new_tokens, "student", max_length)
    examined = load_task_prompts(config, tokenizer, longest)
    return vocab_size, lambda accelerator, student, engine: offline_method(
        config,
        stores,
        examined,
        teachers,
        accelerator,
        student,
        tokenizer,
        engine,
        alignment,
        reader,
    )


def _prepare_on_policy(
    config: OnPolicyJob,
    teachers: Mapping[str, Connection],
    tokenizer: Any,
    vocab_size: int,
    pair: TokenizerPair | SpecialTokenPair | None,
    reader: ImageReader | None,
) -> MakeMethod:
    vision_teachers = [
        name for name, connection in teachers.items() if connection.info.takes_images
    ]
    prompts = _load_prompts(config, tokenizer, reader, vision_teachers)
    if isinstance(pair, TokenizerPair):
        pair.log_facts(prompts[1])
    else:
        check_top_k(config.top_k, vocab_size, "teacher.top_k")
    return lambda accelerator, student, engine: on_policy_method(
        config, prompts, teachers, accelerator, student, tokenizer, engine, pair
    )


def _count_common_ids(
    teachers: Mapping[str, Connection], stores: Stores | None, tokens: list[str], width: int
) -> int:
    """Return the number of ids that the student and all its teachers or stores have in common.

    `tokens`: the student's tokens by id. `width`: the number of its logits. Raises WrongState if a
    tokenizer differs, or if ids with a token have no logit.
    """
    if stores is not None:
        store = stores.training
        return check_stored_vocabulary(store, tokens, width, _load_stored_tokens(store))
    return min(
        (check_vocabulary(teacher, tokens, width) for teacher in teachers.values()), default=width
    )


def _load_stored_tokens(store: TrainingStore) -> list[str] | None:
    """Return the tokens of the store's tokenizer, or None if it is not on this machine."""
    path = Path(store.facts.get("tokenizer") or "?")
    if not path.is_dir():
        return None
    try:
        return vocabulary(load_tokenizer(StudentConfig(model=str(path))))
    except DistillError:
        return None


def _find_resumed_checkpoint(
    config: AnyTraining, run: RunDirectory, from_step: int | None, copies: RunCopies
) -> tuple[int, Path | None]:
    """Collective. Return the step to resume from and its checkpoint; (0, None) for a new run."""
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


def _load_prompts(
    config: OnPolicyJob, tokenizer: Any, reader: ImageReader | None, vision_teachers: Sequence[str]
) -> tuple[ItemsOfSteps[Prompt], list[Prompt]]:
    prompts, held_out = load_prompts(
        config.data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=config.method.max_prompt_tokens,
        seed=config.seed,
        teachers=config.teachers,
        # A teacher may render the messages of a record in its own template, or read more columns.
        with_fields=config.teacher.tokenizer != "same" or reads_another_prompt(config),
        reader=reader,
        vision_teachers=vision_teachers,
    )
    _check_shares(config, len(held_out))
    return prompts, held_out


def _check_shares(config: OnPolicyJob | RLJob | SFTJob, held_out: int) -> None:
    if held_out < config.train.processes:
        data = config.data
        raise InvalidInput(
            f"{held_out} held-out prompts are too few for {config.train.processes} processes",
            field="data.eval_path" if data and data.eval_path else "data.path",
            hint="provide more prompts, or lower train.processes",
        )
