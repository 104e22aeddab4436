"""Offline distillation: the student learns from rows in a store; no teacher runs.

One step, in order:

1. Sequences. `EpochOrder.of_step` (`data/order.py`) selects `train.prompts_per_step` stored
   sequences by the seed and the step number. Each of n processes takes every n-th of them, starting
   at its rank.
2. Rows. A thread verifies and decodes the sequences up to two steps ahead of training
   (`clients/store/dataset.py`). `read` returns them as `PendingRows` (`teachers/source.py`) whose
   rows are already there.
3. Mixture, only if `method.on_policy_fraction` > 0. For the first sequences of the step only the
   prompt is used: the student samples a completion (`rollouts/hf.py`) and a live teacher scores it
   (`teachers/scored_rollouts.py`): `SampledTokens` -> `Rollout` -> `PendingRows`. With a table
   `rollouts`, an engine samples (`rollout_client/rollouts_ahead.py`).
4. Micro-batches. The trainer (`loop/trainer.py`) groups the sequences (`data/packing.py`), several
   to a line if the model allows it, but never stored sequences with sampled ones. It waits for the
   rows of one group (`PendingRows` -> `ScoredSequence`) and makes its tensors (`ScoredSequence` ->
   `Batch`, both in `data/batch.py`).
5. Loss. `DistillationObjective` (`objectives/distillation.py`) computes the forward Top-k KL of
   each token (`losses/topk.py`) from the stored rows and the student's rows (`model/student.py`,
   which calls `losses/fused/linear_loss.py`). It adds `method.cross_entropy` times the
   cross-entropy of the stored tokens.
   A store with another tokenizer (`data.tokenizer`): the student reads its own tokens of the stored
   texts (`cross_tokenizer/store.py`), and the loss is the cross-entropy with the rows of
   word beginnings as control variates, or compares likelihoods (`cross_tokenizer/objectives.py`).
6. Update. The trainer averages over all tokens of all processes, clips the gradient and runs AdamW.

`offline_method` connects these parts. `assembly.py` calls it once when an attempt starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from clients.config.offline import OfflineJob
from clients.config.tables.data import DataConfig, PromptKeys
from clients.data.images import ImageReader, read_stored_images
from clients.store.dataset import LogitDataset
from protos.errors import Corrupt, InvalidInput
from student_trainer.cross_tokenizer.objectives import StoredAnswersObjective
from student_trainer.cross_tokenizer.special_token_store import SpecialTokenStore
from student_trainer.cross_tokenizer.store import CrossTokenizerStore
from student_trainer.data.captured_stores import Stores, TrainingStore, remove_copies
from student_trainer.data.images import with_images
from student_trainer.data.order import EpochOrder, permutation
from student_trainer.data.prompts import Prompt, load_prompts
from student_trainer.data.sequence import TokenSequence
from student_trainer.loop.step import Step
from student_trainer.losses import Tail
from student_trainer.methods.method import (
    Method,
    held_out_evaluation,
    plain_rollouts,
    sampling_settings,
)
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.collectives import raise_on_all_ranks
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.rollout_client.connection import EngineConnection
from student_trainer.rollouts.rollouts import Rollouts
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import RolloutsOfSteps, ScoredRollouts
from student_trainer.teachers.source import PendingRows, TeacherSource, resolved

log = logging.getLogger(__name__)

_STEPS_AHEAD = 2
# Returns a stored sequence, by its index, with its rows.
ReadSequence = Callable[[LogitDataset, int], PendingRows]


@dataclass(frozen=True)
class Mixture:
    """The on-policy part of a step: the student answers the first `count` prompts.

    training: samples the answers. teacher: scores them.
    """

    training: RolloutsOfSteps
    teacher: TeacherSource
    count: int


@dataclass(frozen=True)
class _Share:
    """This process's part of a step, read from the store.

    stored_sequences: with their rows. prompts: the prompts that the student answers, and the
    rollout number of each, which fixes its random stream.
    """

    stored_sequences: list[PendingRows]
    prompts: tuple[list[Prompt], list[int]]


class StoredSteps:
    """Steps of stored sequences, which a thread verifies and decodes ahead of training.

    At most two steps ahead are in memory. The sequences of a step are a pure function of the seed
    and the step number.
    """

    def __init__(
        self,
        data: LogitDataset,
        chosen: NDArray[np.int64],
        accelerator: Accelerator,
        *,
        seed: int,
        per_step: int,
        last_step: int,
        read: ReadSequence,
        mixture: Mixture | None = None,
    ) -> None:
        """Set up the order of the sequences, without reading any.

        `chosen`: int64 indices of the training sequences in `data`. `per_step`: sequences of a step
        over all processes. `last_step`: the last step to read ahead. `read`: reads a sequence.
        `mixture`: None if all sequences of a step are stored ones.
        """
        self._data = data
        self._chosen = chosen
        self._accelerator = accelerator
        self._order = EpochOrder(len(chosen), seed)
        self._per_step = per_step
        self._last_step = last_step
        self._read_sequence = read
        self._mixture = mixture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._reads: dict[int, Future[_Share]] = {}

    def of_step(self, step: int) -> Step:
        """Collective. Return this process's sequences of `step` (from 1) with their rows.

        If a stored sequence is damaged on one rank, raises Corrupt on all ranks, before the step
        changes any weight.
        """
        for read_step in range(step, min(step + _STEPS_AHEAD, self._last_step) + 1):
            if read_step not in self._reads:
                self._reads[read_step] = self._thread.submit(self._read_share, read_step)
        share = raise_on_all_ranks(self._accelerator, self._reads.pop(step).result)
        mixture = self._mixture
        if mixture is None:
            return Step([share.stored_sequences])

        def select_prompts(number: int) -> tuple[Sequence[Prompt], Sequence[int]]:
            # An engine may sample for steps that are not read yet.
            return share.prompts if number == step else self._select_prompts(number)

        sampled_rollouts = mixture.training.of_step(step, select_prompts)
        mixture.teacher.finish()
        return Step(
            [sampled_rollouts + share.stored_sequences],
            mixture.training.metrics(step, sampled_rollouts),
        )

    def _read_share(self, step: int) -> _Share:
        places, own_indices = self._select_sequences(step)
        sampled_count = self._mixture.count if self._mixture else 0
        sequence_indices = [int(self._chosen[places[i]]) for i in own_indices if i >= sampled_count]
        stored_sequences = [self._read_sequence(self._data, index) for index in sequence_indices]
        return _Share(stored_sequences, self._select_prompts(step))

    def _select_prompts(self, step: int) -> tuple[list[Prompt], list[int]]:
        """Return the prompts of a step that the student answers, and their rollout numbers."""
        places, own_indices = self._select_sequences(step)
        sampled_indices = [i for i in own_indices if self._mixture and i < self._mixture.count]
        prompts = [stored_prompt(self._data, int(self._chosen[places[i]])) for i in sampled_indices]
        return prompts, [(step - 1) * len(places) + i for i in sampled_indices]

    def _select_sequences(self, step: int) -> tuple[Sequence[int], range]:
        """Return the sequences of a step, as indices of `chosen`, and those of this process."""
        places = self._order.of_step(step, self._per_step)
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        return places, range(rank, len(places), world)


def read(data: LogitDataset, index: int) -> PendingRows:
    """Return stored sequence `index` with its rows, already resolved.

    Raises Corrupt if its bytes are damaged; the message names the sequence and what to do.
    """
    entry, block = data.decoded(index)
    ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int64)
    return PendingRows(TokenSequence(torch.from_numpy(ids), entry.start), resolved(block))


def make_image_reading(reader: ImageReader, folder: str | None) -> ReadSequence:
    """Return a function like `read` for stores whose sequences name images.

    `reader`: of the student. `folder`: the root of the image paths; None: the folder of the
    captured data. The function raises Corrupt if an image is not the captured one.
    """

    def read_one(data: LogitDataset, index: int) -> PendingRows:
        entry, block = data.decoded(index)
        image_folder = Path(data.metadata["data"]).parent if folder is None else Path(folder)
        stored_images = read_stored_images(entry.images)
        where = f"sequence {index} of {data.path}"
        collapsed_ids = np.frombuffer(entry.token_ids, "<i4")
        try:
            ids, images = with_images(
                collapsed_ids, [image_folder / name for name, _ in stored_images], reader, where
            )
        except InvalidInput as error:
            error.field = "data.image_folder"
            raise
        digests = () if images is None else images.digests
        if digests != tuple(digest for _, digest in stored_images):
            raise Corrupt(
                f"the images of {where} are not those that were captured",
                field="data.image_folder",
                hint="give the folder of the captured images, or capture again",
            )
        start = entry.start + len(ids) - len(collapsed_ids)
        tokens = torch.from_numpy(ids.astype(np.int64))
        return PendingRows(TokenSequence(tokens, start, images=images), resolved(block))

    return read_one


def stored_prompt(data: LogitDataset, index: int) -> Prompt:
    """Return the tokens before the scored ones of stored sequence `index`, without an answer."""
    entry = data.entry(index)
    return Prompt(np.frombuffer(entry.token_ids, "<i4")[: entry.start].astype(np.int32), "")


def offline_method(
    config: OfflineJob,
    stores: Stores,
    task_prompts: list[Prompt],
    teachers: Mapping[str, Connection],
    accelerator: Accelerator,
    student: Replicated | Sharded,
    tokenizer: Any,
    engine: EngineConnection | None,
    other_store: CrossTokenizerStore | SpecialTokenStore | None = None,
    images: ImageReader | None = None,
) -> Method:
    """Build the method of an offline job. The module docstring lists the steps.

    The loss is the forward KL over the teacher's stored top-k. `task_prompts`: the prompts for
    exact match, empty if disabled. `teachers`: the live teacher under the name "", needed only if
    `method.on_policy_fraction` > 0. `engine`: samples the student's answers; None: this process
    samples. `other_store`: reads the stores if they have another tokenizer. `images`: reads the
    images that the stores name; None if they name none.
    """
    store, method = stores.training, config.method
    tail = method.tail or ("bucket+teacher_samples" if store.has_samples else "bucket")
    objective = _make_objective(config, store, tail, isinstance(other_store, CrossTokenizerStore))
    read_sequence = choose_reader(config, other_store, images)
    sampling_options: dict[str, Any] = {"top_k": 0, "temperature": store.temperature, "draws": 0}
    sampling_options["vocab_size"] = student.full.vocab_size
    engine_rollouts = None
    if engine is not None:
        engine_rollouts = engine.rollouts(sampling_settings(config, **sampling_options))
    rollouts: Rollouts = engine_rollouts or plain_rollouts(
        config, student, tokenizer, **sampling_options
    )
    mixture = rollouts_ahead = None
    if config.teacher is not None:
        teacher = _make_teacher(config, store, tail, teachers[""], student.full.vocab_size)
        if engine and engine_rollouts:
            rollouts_ahead = engine.rollouts_ahead(config, teacher, engine_rollouts)
        training = rollouts_ahead or ScoredRollouts(student, rollouts, teacher, config.seed)
        count = round(method.on_policy_fraction * config.sequences_per_step)
        mixture = Mixture(training, teacher, min(max(count, 1), config.sequences_per_step))
    training_indices, held_out_indices = _split(config, stores)
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
        tokenizer,
        rollouts,
        is_stored=True,
    )
    facts = {"store": store.identity}
    return Method(objective, steps.of_step, evaluation, facts=facts, rollouts_ahead=rollouts_ahead)


def choose_reader(
    config: OfflineJob,
    other_store: CrossTokenizerStore | SpecialTokenStore | None,
    images: ImageReader | None,
) -> ReadSequence:
    """Return the function that reads a stored sequence; see `offline_method`."""
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
    """Return the live teacher, whose rows are like those of the store."""
    assert config.teacher is not None, "the caller checks it"
    return RemoteTeacher(
        connection.client,
        top_k=store.top_k,
        temperature=store.temperature,
        f32=config.teacher.logprob_format == "f32",
        tail_samples=store.tail_samples if tail == "bucket+teacher_samples" else 0,
        vocab_size=connection.narrowed_vocab_size(vocab_size),
    )


def load_task_prompts(config: OfflineJob, tokenizer: Any, longest: int) -> list[Prompt]:
    """Return the prompts for `eval.metric`; an empty list if the metric is "none".

    `longest`: prompts with more tokens are left out. Raises InvalidInput if `data.eval_prompts`
    cannot be read, lacks a column, or has no prompt that is short enough.
    """
    path = config.data.eval_prompts
    if config.eval.metric == "none" or path is None:
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
        data, tokenizer, held_out=config.eval.prompts, max_tokens=longest, seed=config.seed
    )
    return task_prompts


def _split(config: OfflineJob, stores: Stores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training and the held-out sequences, a function of the seed."""
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
