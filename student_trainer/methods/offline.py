"""Offline distillation: the student learns from rows in a store; no teacher runs.

One step, in order:

1. Sequences. `EpochOrder.of_step` (`data/order.py`) selects `train.prompts_per_step` stored
   sequences by the seed and the step number. Each of n processes takes every n-th sequence,
   starting at its rank.
2. Rows. A thread verifies and decodes the sequences up to two steps ahead of training
   (`clients/store/dataset.py`). `read` returns them as `PendingRows` (`teachers/source.py`) whose
   rows have already arrived.
3. Mixture, only if `method.on_policy_fraction` > 0. Of the first sequences of the step, only the
   prompts are used: the student samples a completion (`rollouts/rollouts.py`) and a live teacher
   scores it (`teachers/scored_rollouts.py`): `SampledTokens` -> `Rollout` -> `PendingRows`. With a
   table `rollouts`, an engine samples (`rollout_client/rollouts_ahead.py`).
4. Micro-batches. The learner (`loop/learner.py`) groups the sequences (`data/packing.py`), several
   per line if the model allows it. A group has only stored or only sampled sequences. The learner
   waits for the rows of one group (`PendingRows` -> `ScoredSequence`) and makes its tensors
   (`ScoredSequence` -> `Batch`, both in `data/batch.py`).
5. Loss. `DistillationObjective` (`objectives/distillation.py`) computes the forward Top-k KL of
   each token (`losses/topk.py`) from the stored rows and the student's rows (`model/student.py`,
   which calls `losses/fused/linear_loss.py`). It adds `method.cross_entropy` times the
   cross-entropy of the stored tokens. If the store has another tokenizer (`data.tokenizer`), the
   student reads its own tokens of the stored texts (`cross_tokenizer/store.py`). The loss is then
   the cross-entropy, with the rows at which words begin as control variates, or it compares the
   likelihoods of token runs (`cross_tokenizer/objectives.py`).
6. Update. The trainer averages over all tokens of all processes, clips the gradient and runs AdamW.

`prepare` reads and checks the data that the job needs, and `build` connects these parts.
`assembly.py` calls both once when an attempt starts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from clients.config.offline import OfflineJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.data import DataConfig, PromptKeys
from clients.data.images import ImageReader
from clients.preflight.limits import check_room
from protos.errors import DistillError
from student_trainer.cross_tokenizer.objectives import StoredAnswersObjective
from student_trainer.cross_tokenizer.special_token_store import SpecialTokenStore
from student_trainer.cross_tokenizer.store import (
    CrossTokenizerStore,
    open_cross_tokenizer_store,
)
from student_trainer.data.captured_stores import (
    Stores,
    TrainingStore,
    open_stores,
    remove_copies,
)
from student_trainer.data.order import Indices, permutation
from student_trainer.data.prompts import ALL_IDS, ModelIds, Prompt, load_prompts
from student_trainer.loop.learner import Method
from student_trainer.losses import Tail
from student_trainer.methods.offline_steps import (
    Mixture,
    ReadSequence,
    StoredSteps,
    make_image_reading,
    read,
)
from student_trainer.methods.preparation import (
    Inputs,
    Preparation,
    held_out_evaluation,
    plain_rollouts,
    sampling_settings,
)
from student_trainer.model.loading import load_image_reader, load_tokenizer, vocabulary
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.run.model_checks import (
    check_stored_length,
    check_stored_vocabulary,
    check_stored_width,
)
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from student_trainer.teachers.source import PendingRows

log = logging.getLogger(__name__)


def prepare(config: OfflineJob, inputs: Inputs) -> Preparation:
    """Open the stores, check them against student and teacher, and load the evaluation prompts."""
    stores, max_length = open_stores(config), inputs.max_length
    store = stores.training
    readers = {teacher.label: teacher.info.max_length for teacher in inputs.teachers.values()}
    has_images = any(opened and opened.has_images for opened in (store, stores.held_out))
    images = load_image_reader(config.student, "data.path") if has_images else None
    reader = open_cross_tokenizer_store(config, stores, inputs.tokenizer, max_length)
    if reader is None:
        vocab_size = check_stored_vocabulary(
            store, vocabulary(inputs.tokenizer), inputs.width, _load_stored_tokens(store)
        )
        check_stored_length(store, max_length)
    elif isinstance(reader, SpecialTokenStore):
        vocab_size = check_stored_width(store, reader.tokens, inputs.width)
    else:
        vocab_size = min(inputs.width, reader.tokens)
    if config.teacher is not None or config.is_evaluated:
        remedy = "capture again with method.max_tokens of at most"
        for label, context in [*readers.items(), ("student", max_length)]:
            check_room(store.longest, config.method.max_new_tokens, label, context, remedy)
    task_prompts = load_task_prompts(config, inputs.tokenizer, store.longest, inputs.model_ids)
    chosen = split(config, stores)
    read_parts = (inputs, stores, chosen, task_prompts, reader, images)
    return Preparation(
        vocab_size,
        len(chosen[0]),
        lambda job, *parts: build(job, *read_parts, *parts),
        images,
        store,
    )


def _load_stored_tokens(store: TrainingStore) -> list[str] | None:
    """Return the tokens of the tokenizer that the store was captured with.

    None if this tokenizer is not on this machine.
    """
    path = Path(store.facts.get("tokenizer") or "?")
    if not path.is_dir():
        return None
    try:
        return vocabulary(load_tokenizer(StudentConfig(model=str(path))))
    except DistillError:
        return None


def build(
    config: OfflineJob,
    inputs: Inputs,
    stores: Stores,
    chosen: tuple[Indices, Indices],
    task_prompts: list[Prompt],
    other_store: CrossTokenizerStore | SpecialTokenStore | None,
    images: ImageReader | None,
    accelerator: Accelerator,
    student: Replicated | Sharded,
    engine: EngineConnection | None,
) -> Method:
    """Build the method of an offline job. The module docstring lists the steps.

    - chosen: the indices of the training and the held-out sequences; see `split`.
    - task_prompts: the prompts for exact match, empty if it is disabled.
    - other_store: reads the stores if they have another tokenizer; None otherwise.
    - images: reads the images of the stores; None without images.
    - engine: samples the student's answers; None: this process samples.

    The loss is the forward KL over the teacher's stored top-k.
    """
    store, method = stores.training, config.method
    tail = method.tail or ("bucket+teacher_samples" if store.has_samples else "bucket")
    objective = _make_objective(config, store, tail, isinstance(other_store, CrossTokenizerStore))
    read_sequence = choose_reader(config, other_store, images)
    settings = sampling_settings(config, student, top_k=0, temperature=store.temperature)
    engine_rollouts = None if engine is None else engine.rollouts(settings)
    rollouts: Rollouts = engine_rollouts or plain_rollouts(
        config, student, inputs.tokenizer, settings
    )
    mixture = rollouts_ahead = None
    if config.teacher is not None:
        teacher = _make_teacher(config, store, tail, inputs.teachers[""], student.full.vocab_size)
        if engine and engine_rollouts:
            rollouts_ahead = engine.rollouts_ahead(config, teacher, engine_rollouts)
        training = rollouts_ahead or ScoredRollouts(student, rollouts, teacher, config.seed)
        count = round(method.on_policy_fraction * config.sequences_per_step)
        mixture = Mixture(training, teacher, min(max(count, 1), config.sequences_per_step))
    training_indices, held_out_indices = chosen
    steps = StoredSteps(
        store.data,
        training_indices,
        accelerator,
        seed=config.seed,
        per_step=config.sequences_per_step,
        last_step=config.max_steps,
        read=read_sequence,
        mixture=mixture,
    )
    held_out_data = (stores.held_out or store).data
    own_indices = held_out_indices[accelerator.process_index :: accelerator.num_processes]

    def read_held_out() -> list[PendingRows]:
        return [read_sequence(held_out_data, int(index)) for index in own_indices]

    evaluation = held_out_evaluation(
        config,
        accelerator,
        objective,
        read_held_out,
        task_prompts,
        inputs.tokenizer,
        rollouts,
    )
    facts = {"store": store.identity}
    return Method(objective, steps.of_step, evaluation, facts=facts, rollouts_ahead=rollouts_ahead)


def choose_reader(
    config: OfflineJob,
    other_store: CrossTokenizerStore | SpecialTokenStore | None,
    images: ImageReader | None,
) -> ReadSequence:
    """Return the function that reads a stored sequence. `build` describes the parameters."""
    if images is not None:
        return make_image_reading(images, config.data.image_folder)
    return read if other_store is None else other_store.read


def _make_objective(
    config: OfflineJob, store: TrainingStore, tail: Tail, other_tokenizer: bool
) -> DistillationObjective | StoredAnswersObjective:
    weight = config.method.cross_entropy
    if other_tokenizer:
        return StoredAnswersObjective(config.method.match != "row", store.temperature, weight)
    log.info("tail %s, temperature %g, top_k %d", tail, store.temperature, store.top_k)
    return DistillationObjective("forward", tail, store.temperature, weight)


def _make_teacher(
    config: OfflineJob, store: TrainingStore, tail: str, connection: Connection, vocab_size: int
) -> RemoteTeacher:
    """Return the live teacher, which scores rollouts with the same row settings as the store."""
    assert config.teacher is not None, "the caller checks for a teacher"
    return RemoteTeacher(
        connection.client,
        top_k=store.top_k,
        temperature=store.temperature,
        f32=config.teacher.logprob_format == "f32",
        tail_samples=store.tail_samples if tail == "bucket+teacher_samples" else 0,
        vocab_size=connection.narrowed_vocab_size(vocab_size),
    )


def load_task_prompts(
    config: OfflineJob, tokenizer: Any, longest: int, model_ids: ModelIds = ALL_IDS
) -> list[Prompt]:
    """Return the prompts for `eval.metric`; an empty list if the metric is "none".

    `longest`: prompts with more tokens are skipped. Raises InvalidInput if `data.eval_prompts`
    cannot be read or lacks a column, if all its prompts are too long, or if a prompt has a token
    that is not in `model_ids`.
    """
    path = config.data.eval_prompts
    if not config.is_evaluated or path is None:
        return []
    data = DataConfig(
        path=path,
        eval_path=path,
        max_left_out=1.0,
        prompt_column=config.data.prompt_column,
        messages_column=config.data.messages_column,
        answer_column=config.data.answer_column,
        **{key: getattr(config.data, key) for key in PromptKeys.model_fields},
    )
    _, task_prompts = load_prompts(
        data,
        tokenizer,
        held_out=config.eval.prompts,
        max_tokens=longest,
        seed=config.seed,
        model_ids=model_ids,
    )
    return task_prompts


def split(config: OfflineJob, stores: Stores) -> tuple[Indices, Indices]:
    """Return the indices of the training sequences and of the held-out sequences.

    The seed determines them. Training sequences that are copies of held-out sequences are removed.
    """
    count = config.eval.prompts
    training_indices = permutation(len(stores.training.data), config.seed, -1)
    held_out_store = stores.held_out
    if held_out_store is None:
        training_indices, held_out_indices = training_indices[count:], training_indices[:count]
    else:
        held_out_indices = permutation(len(held_out_store.data), config.seed, -1)[:count]
    return remove_copies(
        stores.training, training_indices, held_out_store or stores.training, held_out_indices
    ), held_out_indices
